"""Commands about PCIe links on a machine without GPUs."""

import json
from contextlib import closing

import pytest
from typer.testing import CliRunner

from fusco.cli.main import app
from fusco.rails.board import Board, NamedRail


def test_benchmarks_need_a_gpu():
    done = CliRunner().invoke(app, ("bench", "offload"))
    assert isinstance(done.exception, ValueError)
    assert str(done.exception) == "this machine has no GPU that PyTorch can use"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("offload", "--only", "owner,memory"), "owner, memory: this needs two GPUs, and there is one"),
        (
            ("rails", "--only", "killing", "--policy", "direct"),
            "there is no case of killing with 4 rails for policy direct",
        ),
    ],
)
def test_benchmarks_without_a_case_say_so(arguments, expected, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for function in ("offload.copies.run", "rails.suite.run_suite"):
        monkeypatch.setattr(f"fusco.bench.{function}", lambda *_: (record for record in ()))
    done = CliRunner().invoke(app, ("bench", *arguments))
    assert isinstance(done.exception, ValueError)
    assert str(done.exception) == expected


def test_links_are_shown_as_rails(tmp_path):
    board = Board(tmp_path / "board")
    board.register(0, 0b11, [NamedRail("gpu0 to host", 512 * 10**9), NamedRail("host to gpu0", 0)])
    board.fields[1024] = 1  # a chunk posted
    shown = tmp_path / "shown.jsonl"
    arguments = ("rails", "--links", "--board", str(board.path), "--once", "--interval", "0.05", "--json", str(shown))
    done = CliRunner().invoke(app, arguments)
    board.close()
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in shown.read_text().splitlines()]
    assert [(each["interface"], each["is_owner"], each["outstanding"]) for each in lines] == [
        ("gpu0 to host", True, 1),
        ("host to gpu0", True, 0),
    ]


@pytest.mark.parametrize(
    ("kind", "heading"),
    [((), "rails of this host: no worker is registered"), (("--links",), "PCIe links of GPUs of this host: no GPU is")],
)
def test_without_workers_no_table_is_shown(tmp_path, kind, heading):
    path = tmp_path / "board"
    with closing(Board(path)):
        done = CliRunner().invoke(app, ("rails", *kind, "--board", str(path), "--once", "--interval", "0.05"))
    assert done.output.startswith(heading)
    assert done.output.count("\n") == 1


def test_headings_of_links_name_links_and_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # else the table leaves out letters
    with closing(Board(tmp_path / "board")) as board:
        board.register(0, 1, [NamedRail("gpu0 to host", 0)])
        arguments = ("rails", "--links", "--board", str(board.path), "--once", "--interval", "0.05")
        lines = CliRunner().invoke(app, arguments).output.splitlines()
    assert lines[0].strip() == "PCIe links of GPUs of this host"
    assert {"link", "GPU"} < set(lines[3].split())
    assert "worker" not in lines[3]
