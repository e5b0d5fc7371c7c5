"""``fusco bench decode`` on two ranks, and with rows that are moved wrongly."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from decode_jobs import WRONG, steps_moved_wrongly
from typer.testing import CliRunner

from fusco.bench.decode.exchanges import VARIANTS, obstacle
from fusco.bench.decode.job import DecodeJob
from fusco.bench.harness.model_job import TINY
from fusco.cli.main import app

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]


@pytest.mark.parametrize(
    ("options", "cases"),
    [
        (["--tokens", "1,3"], [(1, 1), (3, 1), (3, 2)]),
        (["--tokens", "3", "--micro-batches", "2", "--dtype", "fp8", "--context", "4", "--routing", "trace"], [(3, 2)]),
    ],
)
def test_all_variants_agree_and_each_has_its_record(tmp_path, options, cases):
    out = tmp_path / "decode.jsonl"
    sizes = ["--iterations", "2", "--json", str(out)]
    done = CliRunner().invoke(app, ["bench", "decode", *sizes, *options])
    assert done.exit_code == 0, done.output
    dtype = "fp8" if "fp8" in options else "bfloat16"
    runnable = [name for name in VARIANTS if not obstacle(name, "cpu", dtype)]
    assert {"fusco", "allgather", "baseline"} <= set(runnable)
    lines = list(map(json.loads, out.read_text().splitlines()))
    skipped = [line["variant"] for line in lines if line["kind"] == "skipped"]
    assert skipped == [name for name in VARIANTS if name not in runnable]
    records = [line for line in lines if line["kind"] == "bench.decode"]
    assert [(each["tokens"], each["micro_batches"]) for each in records[:: len(runnable)]] == cases
    assert [each["variant"] for each in records] == runnable * len(cases)
    for each in records:
        assert each["verified"] is True
        assert 0 < each["tpot_ms"] <= each["p99_ms"]
        assert each["tokens_per_s"] == pytest.approx(2 * each["tokens"] / each["tpot_ms"] * 1e3, rel=0.1, abs=1)
        assert not each["is_graph"]
        assert each["num_iterations"] == 2
    last = done.output.strip().splitlines()[-1]
    assert last.startswith("fusco")
    assert last.endswith("times as fast, verified")


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_rows_that_are_moved_wrongly_are_found(two, dtype):
    job = DecodeJob(
        shape=replace(TINY, hidden=64),
        device="cpu",
        num_ranks=2,
        ranks_per_node=2,
        tokens=(6,),
        variants=("fusco",),
        dtype=dtype,
        num_iterations=1,
    )
    for records in two.run(steps_moved_wrongly, job):
        assert records["none"].verified, records["none"].errors
        assert records["none"].num_iterations == 1
        for name in WRONG:
            assert not records[name].verified, name
            assert records[name].num_iterations == 0  # not timed
            assert any("the output of a layer is" in error for error in records[name].errors)
