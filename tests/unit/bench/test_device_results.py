"""Records, tables and errors made of ranks' figures: between nodes on GPUs, and within one."""

import dataclasses
import io
import json
import re

import numpy as np
import pytest
from rich.console import Console
from workloads import workload

from fusco import Settings
from fusco.bench.harness.json_lines import write_json_lines
from fusco.bench.harness.links import DevicePeaks, InternodePeaks
from fusco.bench.inputs.traffic import Trace
from fusco.bench.shuffle.ranks import DeviceResult, DeviceTimes
from fusco.bench.shuffle.run import ShuffleRun
from fusco.bench.shuffle.summary import summarize
from fusco.cli.shuffle_tables import table_of_records
from fusco.core.profile import CallProfile

# Two ranks, a node each: rank 0 sends two rows, rank 1 one row; expert 0 is rank 0's.
TRACE = Trace(np.array([[1], [1], [0], [1]]), "by hand")
PEAKS = DevicePeaks(local_gbs=4000.0, internode=InternodePeaks(paired_gbs=5.0, spread_gbs=6.25))


def run_of(num_nodes, variants):
    # Rows of 25 kB: 4 microseconds at the better peak.
    load = workload("trace", num_nodes, 2 // num_nodes, num_experts=2, hidden=12500, trace=TRACE)
    return ShuffleRun(
        workloads=(load,), variants=variants, settings=Settings(), balancer="rotation", num_iterations=3, device="cuda"
    )


def profile(num_rows):
    return CallProfile(internode_row_bytes=num_rows * 25_000, internode_metadata_bytes=10, num_sms=num_rows + 1)


def rank_result(variants, dispatch_ms, combine_ms, sends, receives):
    total_ms = [sum(both) for both in zip(dispatch_ms, combine_ms, strict=True)]
    times = DeviceTimes(dispatch_ms, combine_ms, total_ms, loop_ms=[time / 2 for time in total_ms], idle_ms=[9.0])
    return DeviceResult(
        PEAKS,
        errors={name: [] for name in variants},
        times=dict.fromkeys(variants, times),
        profiles=dict.fromkeys(variants, (profile(sends), profile(receives))),
    )


@pytest.fixture
def ranks():
    return [
        [rank_result(("fusco", "baseline"), [1.0, 5.0, 2.0], [1.0, 1.0, 1.0], sends=2, receives=1)],
        [rank_result(("fusco", "baseline"), [3.0, 1.0, 1.0], [2.0, 2.0, 2.0], sends=1, receives=2)],
    ]


def test_times_are_held_against_the_busiest_rank_at_the_best_peak(ranks, tmp_path):
    records = summarize(run_of(2, ("fusco", "baseline")), ranks, "set: nothing")
    fusco, baseline = records
    assert (fusco.variant, fusco.balancer, baseline.balancer) == ("fusco", "rotation", "none")
    assert fusco.dispatch_ms == 3.0  # slowest ranks: 3, 5, 2
    assert fusco.combine_ms == 2.0
    assert (fusco.total_ms, fusco.loop_ms, fusco.idle_ms) == (5.0, 2.5, 9.0)
    assert fusco.internode_row_bytes == fusco.internode_row_bytes_lower_bound == 75_000
    assert fusco.combine_internode_row_bytes == 75_000
    assert fusco.busiest_rank_bytes == 50_000
    assert (fusco.internode_peak_gbs, fusco.bound_ms) == (6.25, 0.008)
    assert (fusco.dispatch_over_bound, fusco.combine_over_bound) == (375.0, 250.0)
    assert (fusco.metadata_bytes, fusco.num_sms) == (20, {"dispatch": 3, "combine": 2})
    assert all(record.is_right for record in records)
    write_json_lines(records, tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["peaks"] for line in lines] == [{"local_gbs": 4000.0, "paired_gbs": 5.0, "spread_gbs": 6.25}] * 2
    assert lines[0]["hardware"]["gpu"]


def test_a_row_too_many_is_an_error(ranks):
    for call in (0, 1):
        counted = list(ranks[1][0].profiles["fusco"])
        counted[call] = dataclasses.replace(counted[call], internode_row_bytes=50_001)
        ranks[1][0].profiles["fusco"] = tuple(counted)
    fusco, baseline = summarize(run_of(2, ("fusco", "baseline")), ranks, "")
    assert not fusco.is_right
    assert fusco.errors[0] == "dispatch sent 100001 bytes of rows between nodes, its plan requires 75000"
    assert fusco.errors[1].startswith("combine sent")
    assert baseline.is_right


def test_an_error_of_any_rank_counts(ranks):
    ranks[1][0].errors["baseline"].append("rank 1: 3 dispatched rows are wrong")
    fusco, baseline = summarize(run_of(2, ("fusco", "baseline")), ranks, "")
    assert (fusco.is_right, baseline.is_right) == (True, False)
    assert baseline.errors == ["rank 1: 3 dispatched rows are wrong"]


def text_of(records):
    out = io.StringIO()
    Console(width=170, file=out).print(table_of_records(records))
    return out.getvalue()


def test_the_table_between_nodes(ranks):
    records = summarize(run_of(2, ("fusco", "baseline")), ranks, "set: NCCL_HOSTID=a | b")
    shown = text_of(records)
    assert "2 nodes x 1 rank, " in shown
    assert "fusco: output sized exactly" in shown
    assert "5.00 with one rank, 6.25 with all of other nodes" in shown
    assert "emulated on one machine" in shown
    assert "NCCL_HOSTID=a | b" in shown
    on_a_cluster = summarize(run_of(2, ("fusco", "baseline")), ranks, "")
    assert "played" not in text_of(on_a_cluster)


def test_the_table_within_a_node(ranks):
    for rank in ranks:
        result = rank[0]
        result.peaks = DevicePeaks(400.0, 380.0, 300.0, 310.0, 4000.0)
        result.remote_row_bytes = 76_000_000
        result.kernel_us = {"plan": 29.4, "scatter_rows": 990.6}
        result.profiles["baseline"] = (CallProfile(), CallProfile())  # takes none of them itself
        result.errors["fusco-fp8"], result.times["fusco-fp8"] = [], DeviceTimes(dispatch_ms=[0.5] * 3)
    records = summarize(run_of(1, ("fusco", "baseline", "fusco-fp8")), ranks)
    fusco, _, fp8 = records
    assert (fusco.dispatch_gbs, fusco.dispatch_of_peak) == (25.3, 0.067)
    assert (fusco.loop_ms, fusco.idle_ms) == (2.5, 9.0)
    assert (fp8.dtype, fp8.combine_ms, fp8.total_ms, fp8.loop_ms) == ("float8_e4m3fn", None, None, None)
    assert set(fusco.peaks) == {
        "copy_engine_push_gbs",
        "copy_engine_pull_gbs",
        "sm_push_gbs",
        "sm_pull_gbs",
        "local_gbs",
    }
    records[1] = dataclasses.replace(records[1], loop_ms=7.5)
    shown = text_of(records)
    assert "2 ranks" in shown
    assert " 3.00 " in re.search("fusco  .*", shown)[0]  # the baseline's 7.5 in a row, over 2.5
    assert "copy engine 380 pulling, 400 pushing" in shown
    assert "SMs taken by fusco: dispatch 3, combine 2" in shown
    assert "waiting included: plan 29, scatter_rows 991" in shown
    assert "fusco-static" not in shown
    assert "SMs taken" not in text_of(records[1:2])


def test_workloads_of_a_run_have_one_shape():
    run = run_of(2, ("fusco",))
    with pytest.raises(ValueError, match="one shape, got 2"):
        dataclasses.replace(run, workloads=(run.shape, dataclasses.replace(run.shape, hidden=8)))
