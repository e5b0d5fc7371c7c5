"""``fusco train`` with real ranks: both dispatchers learn alike, and ``fusco bench`` replays the routing."""

from __future__ import annotations

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers", reason="fusco train needs transformers: pip install 'transformers>=5.9'")

from launching import launch
from train_jobs import second_losses_of, train_until_rows_do_not_arrive, train_with_slow_reports

from fusco.bench.ranks.local_world import LocalWorld
from fusco.bench.ranks.progress import watching
from fusco.bench.train.job import TrainingJob, byte_model
from fusco.bench.train.rank import train_and_log
from fusco.cli.main import app

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]

ROOT = Path(__file__).parents[2]
SIZES = {"layers": 2, "hidden": 32, "num-experts": 8, "num-topk": 2, "moe-intermediate": 16, "tokens": 32, "length": 16}
SIZES["sample-tokens"] = 2  # as many forward passes; 64 would take longer than the steps of most tests
SMALL = [argument for name, size in SIZES.items() for argument in (f"--{name}", str(size))]
CAP = ["--text-bytes", "100000"]


def read(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [[line for line in lines if line["kind"] == kind] for kind in ("step", "run")]


def test_both_dispatchers_learn_alike_and_the_routing_replays(tmp_path):
    out, trace, replayed = tmp_path / "train.jsonl", tmp_path / "trace.npz", tmp_path / "shuffle.jsonl"
    arguments = ["--ranks", "2", "--steps", "8", "--lr", "0.02", "--dispatcher", "both", "--json", str(out)]
    done = CliRunner().invoke(app, ["train", *SMALL, *CAP, *arguments, "--record-trace", str(trace)])
    assert done.exit_code == 0, done.output
    steps, runs = read(out)
    assert [run["dispatcher"] for run in runs] == ["fusco", "torch"]
    losses = {name: [step["loss"] for step in steps if step["dispatcher"] == name] for name in ("fusco", "torch")}
    assert losses["fusco"][-1] < losses["fusco"][0] - 0.3
    assert len(losses["fusco"]) == 8
    assert losses["torch"] == pytest.approx(losses["fusco"], abs=1e-3)
    assert runs[1]["max_loss_difference"] < 1e-3
    for step in steps:
        parts = [step[f"{name}_ms"] for name in ("dispatch", "combine", "dispatch_backward", "combine_backward")]
        assert min(parts) > 0
        assert sum(parts) < step["step_ms"]
        # Parts are means over ranks, and a step is the slowest rank's: no rank's share is smaller for that.
        assert 0.99 * sum(parts) / step["step_ms"] - 1e-3 <= step["shuffle_share"] <= 1
        assert 1 <= step["expert_imbalance"] <= 4  # all tokens have the same two of eight experts
    assert "losses of the two, step by step" in done.output

    ids = np.load(trace)["topk_idx"]
    assert ids.shape == (2 * 32, 2, 2)
    assert ids.max() < 8
    assert (ids[..., 0] != ids[..., 1]).all()
    replay(done.output, replayed)


def test_by_default_ranks_share_experts_and_the_first_group_replays(tmp_path):
    """Four ranks, two of which have all experts; six experts, which four ranks could not have alike."""
    out, trace, replayed = tmp_path / "train.jsonl", tmp_path / "a trace.npz", tmp_path / "shuffle.jsonl"
    arguments = ["--num-experts", "6", "--steps", "8", "--lr", "0.02", "--json", str(out)]
    arguments += ["--metrics", f"{tmp_path}/m.csv,{tmp_path}/m.jsonl"]
    done = CliRunner().invoke(app, ["train", *SMALL, *arguments, *CAP, "--record-trace", str(trace)])
    assert done.exit_code == 0, done.output
    steps, (run,) = read(out)
    assert (run["job"]["num_ranks"], run["job"]["ep_size"]) == (4, 2)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    losses = [step["loss"] for step in steps]
    with (tmp_path / "m.csv").open() as file:
        assert [float(row["loss"]) for row in csv.DictReader(file)] == pytest.approx(losses, abs=1e-6)
    metrics = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == list(range(1, 9))
    assert np.load(trace)["topk_idx"].shape == (4 * 32, 2, 2)
    for record in replay(done.output, replayed):
        assert (record["nodes"], record["ranks_per_node"], record["tokens"]) == (1, 2, 32)
        assert record["trace_repeats"] == 0.5


def replay(output, json_path):
    """The records of the command that ``output`` names."""
    command = shlex.split(output[output.index("fusco bench shuffle") :])
    assert command[:2] == ["fusco", "bench"]
    done = CliRunner().invoke(app, [*command[1:], "--iterations", "2", "--json", str(json_path)])
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in json_path.read_text().splitlines()]
    assert all(record["verified"] for record in records)
    return records


def test_ranks_of_torchrun(tmp_path):
    """With checkpointing in bfloat16, from a text of the user."""
    text, out = tmp_path / "text", tmp_path / "train.jsonl"
    text.write_text("to and fro, " * 300)
    more = ["--steps", "6", "--lr", "0.02", "--text", str(text), "--activation-checkpointing", "full"]
    done = launch(2, "fusco", ["train", *SMALL, *more, "--dtype", "bfloat16", "--json", str(out)], tmp_path / "logs")
    assert done.is_ok, done.stderr
    steps, (run,) = read(out)
    assert run["job"]["num_ranks"] == 2
    assert run["job"]["dtype"] == "bfloat16"
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert done.stdout.count("loss of the first step") == 1  # rank 0 alone shows anything


def one_rank_job(**changes):
    shape = byte_model(num_layers=1, hidden=32, num_experts=4, num_topk=2, moe_intermediate=16)
    sizes = {"num_ranks": 1, "ep_size": 1, "tokens": 32, "length": 16, "text_bytes": 100_000, "learning_rate": 0.01}
    sizes["sample_tokens"] = 0
    return TrainingJob(shape=shape, dtype="float32", **{**sizes, **changes})


def test_the_learning_rate_rises_step_by_step(one):
    """AdamW's first step is as long as the rate, whatever the gradients; so is what it does to the loss, nearly."""
    nums_steps = (0, 2, 4, 10**9)
    jobs = [one_rank_job(num_steps=2, warmup_steps=num, learning_rate=2e-3) for num in nums_steps]
    second_losses = dict(zip(nums_steps, one.run(second_losses_of, jobs)[0], strict=True))
    at_once, in_two, in_four = (second_losses[number] - second_losses[10**9] for number in (0, 2, 4))
    assert at_once < -0.01
    assert in_two == pytest.approx(at_once / 2, rel=0.2)
    assert in_four == pytest.approx(at_once / 4, rel=0.2)


def test_a_plan_for_every_batch_learns_alike(two):
    jobs = [one_rank_job(num_ranks=2, ep_size=2, num_steps=2, spare_places=number) for number in (0, 1)]
    without, balanced = two.run(second_losses_of, jobs)[0]
    assert balanced == pytest.approx(without, rel=1e-5)


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_no_step_is_made_on_rows_that_did_not_arrive(one, checkpointing):
    job = one_rank_job(num_steps=4, activation_checkpointing=checkpointing)
    (done,) = one.run(train_until_rows_do_not_arrive, job, 2)
    assert done == [*["synchronize", "step", "report"] * 2, "synchronize", "error"]


def test_reports_are_not_in_the_time_of_a_step(two):
    job = one_rank_job(num_ranks=2, ep_size=2, num_steps=3)
    for times_ms in two.run(train_with_slow_reports, job, 0.8):
        assert min(times_ms[1:]) < 800


def test_a_step_is_logged_as_soon_as_it_is_done(tmp_path):
    log, seen = tmp_path / "steps.jsonl", []

    def look(num_done, num_steps, _):
        assert num_done == 0 or num_steps == 4
        seen.append((num_done, len(log.read_text().splitlines()) if log.exists() else 0))

    with LocalWorld(1) as world, watching(world.store, look):
        world.run(train_and_log, 1, one_rank_job(num_steps=4), None, False, log, world.store.port)
    assert all(num_lines >= num_done for num_done, num_lines in seen)
    assert seen[-1] == (4, 4)
    assert [step["step"] for step in read(log)[0]] == [0, 1, 2, 3]


def test_an_interrupted_run_ends_at_once_and_leaves_its_steps(tmp_path):
    """As by Ctrl-C, which a terminal sends to all processes; ranks ignore it, as tests of ``LocalWorld`` see."""
    out = tmp_path / "train.jsonl"
    command = [sys.executable, "-m", "fusco", "train", *SMALL, *CAP, "--steps", "100000", "--ranks", "2"]
    command += ["--json", str(out)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **streams) as run:
        try:
            wait_until(lambda: run.poll() is not None or (out.exists() and out.read_text().count("\n") > 3), 200)
            os.killpg(run.pid, signal.SIGINT)
            output, _ = run.communicate(timeout=60)
            wait_until(lambda: not is_any_left(run.pid), 20)
        finally:
            if is_any_left(run.pid):
                os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 130, output
    assert output.rstrip().endswith(f"interrupted; the steps until then are in {out}")
    assert "Traceback" not in output
    steps, summaries = read(out)
    assert [step["step"] for step in steps] == list(range(len(steps)))
    assert not summaries


def wait_until(is_so, limit_s):
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_any_left(process_group):
    try:
        os.killpg(process_group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ep-size", "4", "--num-experts", "6"], "ep_size=4 does not divide the 6 experts of a layer"),
        (["--text", "nowhere"], "there is no file or directory nowhere to train on"),
        (["--text-bytes", "50"], "have 50 bytes (of at most 50 to be read), and one step"),
        (["--record-trace", "trace.txt"], "a trace is a file .npz or .npy, got trace.txt"),
        (["--device", "cuda"], "--device cuda needs a GPU, and torch finds none"),
    ],
)
def test_invalid_options_are_rejected_before_any_rank_starts(arguments, text, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = CliRunner().invoke(app, ["train", *SMALL, *arguments])
    assert isinstance(done.exception, ValueError)
    assert text in str(done.exception)
