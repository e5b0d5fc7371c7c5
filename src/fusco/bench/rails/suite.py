"""The benchmarks of rails by name."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from fusco.bench.rails.contention import measure_bandwidth, measure_contention, measure_incast, measure_steps
from fusco.bench.rails.costs import measure_change, measure_costs
from fusco.bench.rails.exchange import measure_all_to_all, measure_embeddings
from fusco.bench.rails.faults import measure_flapping, measure_killing
from fusco.bench.rails.record import CaseResult, RailsRecord
from fusco.bench.rails.serving import measure_serving
from fusco.testbed import Testbed


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: what it is the analogue of, hosts that it needs, seconds of a case unless others are given."""

    analogue: str
    measure: Callable[[Testbed, list[str], float], Iterator[CaseResult]]
    num_hosts: int = 2
    seconds: float = 3.0


BENCHMARKS: dict[str, Benchmark] = {
    "bandwidth": Benchmark("Figure 9", measure_bandwidth, seconds=2.0),
    "contention": Benchmark("Figure 7", measure_contention, seconds=5.0),
    "steps": Benchmark("Table 2", measure_steps),
    "incast": Benchmark("section 4.3.2", measure_incast, num_hosts=3, seconds=5.0),
    "serving": Benchmark("Table 4", measure_serving, seconds=12.0),
    "all-to-all": Benchmark("Figure 12", measure_all_to_all),
    "embeddings": Benchmark("Figure 13", measure_embeddings),
    "costs": Benchmark("Table 3", measure_costs),
    "change": Benchmark("Figure 10", measure_change),
    "flapping": Benchmark("none", measure_flapping, seconds=6.0),
    "killing": Benchmark("none", measure_killing),
}

_OF_PLUGIN = ("bandwidth", "contention", "incast", "serving", "flapping", "killing")  # traffic in one direction only


def run_suite(
    names: Sequence[str], policies: Sequence[str], layout: tuple[int, str], seconds: float | None
) -> Generator[RailsRecord, None, None]:
    """Run benchmarks by name and yield each record as soon as it is there.

    ``policies`` are names of ``fusco.rails.POLICIES``, or ``"nccl"`` for the plugin. ``layout`` is the number of rails
    of a host and their rate, such as ``"2gbit"``. A case takes ``seconds``, by default each benchmark's.
    """
    for name in names:
        benchmark = BENCHMARKS[name]
        with Testbed(benchmark.num_hosts, *layout) as bed:
            allowed = [each for each in policies if each != "nccl" or name in _OF_PLUGIN]
            shape = (bed.layout.num_hosts, bed.layout.num_rails, bed.layout.rate)
            for case, policy, results in benchmark.measure(bed, allowed, seconds or benchmark.seconds):
                yield RailsRecord(name, benchmark.analogue, case, policy, *shape, results)
