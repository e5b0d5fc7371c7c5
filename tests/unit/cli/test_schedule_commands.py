"""The commands about schedules: what they show is what they compute."""

import json
from typing import get_args

import numpy as np
import pytest
from typer.testing import CliRunner

from fusco.bench.inputs.matrices import load_matrix
from fusco.bench.names import MatrixKind
from fusco.bench.schedule import FAST_US
from fusco.cli.main import app
from fusco.cli.schedule import draw_gantt


def run(*arguments):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("matrix", get_args(MatrixKind))
def test_a_matrix_that_is_made(matrix, tmp_path):
    out = tmp_path / "schedule.jsonl"
    done = run("schedule", "--nodes", "5", "--matrix", matrix, "--json", str(out))
    assert done.exit_code == 0, done.output
    records = {record["mode"]: record for record in lines(out)}
    assert set(records) == {"exact", "few", "spread-out"}
    assert records["exact"]["total_bytes"] == records["exact"]["lower_bound_bytes"]
    assert sum(record["is_chosen"] for record in records.values()) == 1
    for record in records.values():
        assert sum(map(sum, record["num_bytes"])) == sum(map(sum, records["exact"]["num_bytes"]))
        assert record["modelled_us"] > record["latency_us"] * record["num_stages"]


@pytest.mark.parametrize("suffix", [".npy", ".csv"])
def test_a_matrix_from_a_file(suffix, tmp_path):
    matrix = np.array([[0, 2, 4, 5], [4, 0, 3, 6], [2, 6, 0, 3], [5, 4, 1, 0]]) * 10**6
    path = tmp_path / f"fig9{suffix}"
    if suffix == ".npy":
        np.save(path, matrix)
    else:
        np.savetxt(path, matrix, fmt="%d", delimiter=",")
    done = run("schedule", "--file", str(path), "--mode", "spread-out")
    assert done.exit_code == 0, done.output
    assert "lower bound: 14.0 MB" in done.output
    assert "1.2143" in done.output  # 17 / 14
    assert "0>1 1>2 2>3 3>0" in done.output


def test_many_nodes_and_stages_are_cut_short():
    done = run("schedule", "--nodes", "40", "--mode", "spread-out")
    assert done.exit_code == 0, done.output
    words = " ".join(done.output.replace("│", " ").split())
    assert "N>O and 16 more 1 " in words  # of the first stage's pairs
    assert "... and 15 more" in words  # stages
    assert " ... and 16 more nodes mode '" in words


def test_nodes_without_a_letter_have_a_number():
    done = run("schedule", "--nodes", "70", "--mode", "few")
    assert done.exit_code == 0, done.output
    assert "0>" in done.output
    assert "#>" not in done.output
    assert "letters, # for nodes from 62 on" in done.output


def test_options_of_a_matrix_that_is_made_do_not_go_with_a_file(tmp_path):
    path = tmp_path / "matrix.csv"
    path.write_text("0,1\n2,0\n")
    done = run("schedule", "--file", str(path), "--nodes", "4", "--largest", "9")
    assert "--nodes, --largest: for a matrix that is made" in str(done.exception)


def test_one_node_has_nothing_to_send():
    done = run("schedule", "--nodes", "1")
    assert done.exit_code == 0, done.output
    assert "nothing to send" in done.output
    assert "who sends to whom" not in done.output


def test_what_is_refused(tmp_path):
    text, ragged = tmp_path / "matrix.txt", tmp_path / "ragged.csv"
    text.write_text("1")
    ragged.write_text("0,1,2\n\n3,0\n")
    wide = tmp_path / "wide.csv"
    wide.write_text("0,1,2\n3,0,4\n")
    halves = tmp_path / "halves.npy"
    np.save(halves, np.full((2, 2), 0.5))
    words, junk, empty = (tmp_path / name for name in ("words.csv", "junk.npy", "empty.csv"))
    words.write_text("0,1\n2,two\n")
    junk.write_bytes(b"junk")
    empty.write_text("\n")
    negative = tmp_path / "negative.csv"
    negative.write_text("0,-1\n3,0\n")
    for path, message in (
        (text, "from a .npy or .csv file, got"),
        (ragged, f"{ragged}, line 3: 2 entries, but 3 in the first row"),
        (words, f"{words}, line 2: expected integers with commas between them, got '2,two'"),
        (junk, f"{junk} is not an npy or npz file of numbers"),
        (empty, f"{empty} is empty"),
        (wide, "must be a square matrix, got shape (2, 3)"),
        (halves, "must hold integers, got float64"),
        (negative, "must not be negative, got -1 from node 0 to node 1"),
    ):
        done = run("schedule", "--file", str(path))
        assert isinstance(done.exception, ValueError)
        assert message in str(done.exception)
    assert "internode_gbs must be above zero, got 0.0" in str(run("schedule", "--internode-gbs", "0").exception)


@pytest.mark.parametrize("arguments", [["--nodes", "257"], ["--largest", str(2**63 - 1)]])
def test_what_would_not_fit_is_refused_as_an_option(arguments):
    done = run("schedule", *arguments)
    assert done.exit_code == 2
    assert f"Invalid value for '{arguments[0]}'" in done.output


def test_sums_beyond_int64_are_refused():
    done = run("schedule", "--nodes", "8", "--largest", str(2**62))
    assert isinstance(done.exception, ValueError)
    assert "more than int64 holds" in str(done.exception)


def test_gantt_lines_have_one_width():
    picture = draw_gantt([[1, 2, 0], [2, 0, -1]], [[5, 3, 4], [1, 2, 0]], [5, 2], width=30)
    assert [str(line) for line in picture] == [
        "   |                    |",
        "0  11111111111111111111122222····",
        "1  2222222222222········000000000",
        "2  00000000000000000·············",
    ]


def test_the_benchmark_measures_every_mode(tmp_path):
    out = tmp_path / "schedules.jsonl"
    done = run("bench", "schedule", "--draws", "3", "--nodes", "4", "--nodes", "9", "--json", str(out))
    assert done.exit_code == 0, done.output
    records = lines(out)
    assert [(record["num_nodes"], record["mode"]) for record in records] == [
        (size, mode) for size in (4, 9) for mode in ("exact", "few", "spread-out")
    ]
    for record in records:
        assert record["fast_us"] == FAST_US.get(record["num_nodes"])
        assert record["microseconds"] > 0
        assert 1 <= record["mean_ratio"] <= record["largest_ratio"]
        assert {"numba", "torch"} <= set(record["versions"])
    assert "3.4" in done.output


def test_a_csv_file_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "marked.csv"
    path.write_text("0,5\n7,0\n", encoding="utf-8-sig")
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    assert load_matrix(path).tolist() == [[0, 5], [7, 0]]
