"""``fusco train --save`` is killed, and ``--resume`` ends where an uninterrupted run does, bit for bit."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from typer.testing import CliRunner

pytest.importorskip("transformers", reason="fusco train needs transformers: pip install 'transformers>=5.9'")

from test_train import SMALL

from fusco.cli.main import app

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]

RUN = [*SMALL, "--text-bytes", "100000", "--ranks", "2", "--dropout", "0.2", "--steps", "12"]


def train(*arguments):
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def kill_ranks_after(step, others):
    deadline = time.monotonic() + 120
    while not step.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    for rank in {*multiprocessing.active_children()} - others:
        rank.kill()


def losses(path):
    steps = [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == "step"]
    assert [step["step"] for step in steps] == list(range(12))
    return [(step["loss"], step["gradient_norm"]) for step in steps]


def weights(run, into):
    dcp_to_torch_save(run / "step-00000012", into)
    return torch.load(into)


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_a_killed_run_continues_bit_for_bit(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = train(*RUN, "--save", whole, "--json", tmp_path / "whole.jsonl")
    assert done.exit_code == 0, done.output
    log = tmp_path / "killed.jsonl"
    others = {*multiprocessing.active_children()}  # of other tests
    killer = threading.Thread(target=kill_ranks_after, args=(killed / "step-00000004", others))
    killer.start()
    done = train(*RUN, "--save", killed, "--save-every", "2", "--json", log)
    killer.join()
    assert "exit code -9" in str(done.exception)
    assert not (killed / "step-00000012").exists()
    done = train("--resume", killed, "--keep-last", "1", "--json", log)
    assert done.exit_code == 0, done.output
    assert losses(log) == losses(tmp_path / "whole.jsonl")
    assert same(weights(whole, tmp_path / "whole.pt"), weights(killed, tmp_path / "killed.pt"))
    assert [path.name for path in killed.glob("step-*")] == ["step-00000012"]

    for arguments, text in (
        (["--resume", killed], f"the run in {killed} has 12 steps, of --steps 12: ask for more"),
        (
            ["--resume", killed, "--hidden", "64"],
            f"--hidden 64 does not continue the run in {killed}, which has --hidden 32",
        ),
        ([*RUN, "--save", killed], f"{killed} has saved steps: continue with --resume {killed}"),
        (["--resume", tmp_path], f"{tmp_path} has no options.json"),
        (["--save-every", "3"], "--save-every and --keep-last go with --save FOLDER"),
    ):
        assert text in str(train(*arguments).exception)
