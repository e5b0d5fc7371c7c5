"""Records of the CPU's benchmark, made of ranks' figures by hand."""

import time
from dataclasses import replace

import pytest
from workloads import workload

from fusco import Settings
from fusco.bench.harness.links import InternodePeaks, LinkPeaks
from fusco.bench.harness.stopwatch import CoreTimes
from fusco.bench.shuffle.ranks import Iteration, RankResult
from fusco.bench.shuffle.records import gains_of
from fusco.bench.shuffle.run import ShuffleRun
from fusco.bench.shuffle.summary import summarize
from fusco.core.profile import CallProfile

RUN = ShuffleRun(
    workloads=(workload("uniform", nodes=1, num_experts=2),),
    variants=("fusco",),
    settings=Settings(),
    balancer="static",
    num_iterations=3,
)


def result_of(*seconds: tuple[float, float]) -> list[RankResult]:
    iterations = [
        Iteration(dispatch, combine, CallProfile(), CallProfile(), CoreTimes(process_s=0.25, busy_s=0.9, all_s=1.0))
        for dispatch, combine in seconds
    ]
    return [RankResult(LinkPeaks(InternodePeaks(), 1.0), {"fusco": []}, {"fusco": iterations})]


def test_the_total_has_the_slowest_dispatch_and_the_slowest_combine_of_different_ranks():
    """All ranks wait for each other in between, so a rank's own sum would leave out what it waits for."""
    slow_in_dispatch = result_of((0.100, 0.010), (0.110, 0.010), (0.900, 0.010))
    slow_in_combine = result_of((0.020, 0.080), (0.020, 0.090), (0.020, 0.070))
    (record,) = summarize(RUN, [slow_in_dispatch, slow_in_combine])
    assert (record.dispatch_ms, record.combine_ms) == (110.0, 80.0)
    assert record.total_ms == 200.0  # the iterations: 180, 200, 970
    assert record.total_ms >= record.dispatch_ms


def test_a_total_is_no_less_than_any_part_of_it():
    ranks = [result_of((0.3, 0.0), (0.3, 0.0), (0.0, 0.0)), result_of((0.0, 0.4), (0.0, 0.4), (0.0, 0.4))]
    (record,) = summarize(RUN, ranks)
    assert record.total_ms == 700.0


def test_a_record_of_a_testbed_says_what_other_processes_took_of_the_cores():
    ranks = [result_of((0.1, 0.1), (0.1, 0.1)), result_of((0.1, 0.1), (0.1, 0.1))]
    (record,) = summarize(replace(RUN, rank_gbs=1.0), ranks)
    assert record.other_cores_share == 0.4
    (elsewhere,) = summarize(RUN, ranks)  # where ranks may be on several machines
    assert elsewhere.other_cores_share == 0.0


def test_core_times_of_a_machine_contain_those_of_a_process():
    start, deadline = CoreTimes.now(), time.process_time() + 0.1
    while time.process_time() < deadline:
        pass
    spent = CoreTimes.now().since(start)
    assert 0.1 <= spent.process_s < spent.all_s
    assert 0.05 < spent.busy_s <= spent.all_s  # it has steps of 10 ms for each core


def test_gains_are_of_the_same_batches():
    (one,) = summarize(RUN, [result_of((1.0, 1.0)), result_of((1.0, 1.0))])
    batches = [(100.0, 10, 100.0, 10), (100.0, 10, 150.0, 20), (400.0, 10, 800.0, 30)]
    records = [
        replace(one, variant=name, batch=batch, total_ms=total, busiest_rank_bytes=rows)
        for batch, (total, rows, other_total, other_rows) in enumerate(batches)
        for name, total, rows in (("fusco", total, rows), ("no-lanes", other_total, other_rows))
    ]
    (gain,) = gains_of(records)
    assert (gain.variant, gain.median, gain.rows_median) == ("no-lanes", 1.5, 2.0)
    assert gain.p99 == pytest.approx(1.99)
    assert gain.rows_p99 == pytest.approx(2.98)
