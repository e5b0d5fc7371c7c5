"""Prefill hands its cache to decode: 4, 2 or 1 serving instances on the rails of a host (FuseLink, Table 4)."""

from __future__ import annotations

import time
from contextlib import ExitStack

from fusco.bench.rails import roles
from fusco.bench.rails.arrivals import Arrivals, azure, poisson
from fusco.bench.rails.bandwidth import START_S
from fusco.bench.rails.crew import VARIANTS, Crew
from fusco.bench.rails.record import Report, line_rate, percentile_ms
from fusco.rails import Policy
from fusco.testbed import Testbed

_LOAD = 0.5
_MEAN_S = 0.1  # of a request on its direct rail: 25 MB at 2 Gbit/s


def measure_serving(bed: Testbed, policies: list[str], seconds: float, report: Report) -> None:
    """Measure the time from arrival to delivery of requests; ranks of an instance send their shares at once."""
    num_rails, bytes_per_s = bed.layout.num_rails, 1e9 * line_rate(bed)
    mean_bytes = int(_MEAN_S * bytes_per_s)
    cases = [(num_rails, "Poisson"), (num_rails // 2, "Poisson"), (1, "Poisson"), (num_rails, "Azure trace")]
    for instances, kind in dict.fromkeys(cases):
        arrivals = [
            poisson(seconds, _LOAD, bytes_per_s, mean_bytes, seed=i)
            if kind == "Poisson"
            else azure(seconds, _LOAD, bytes_per_s, mean_bytes, instance=i)
            for i in range(instances)
        ]
        for name in policies:
            latencies = run(bed, VARIANTS[name], arrivals)
            results = {
                "P50 ms": percentile_ms(latencies, 50),
                "P99 ms": percentile_ms(latencies, 99),
                "requests": float(len(latencies)),
            }
            report(f"{instances} instance{'s' * (instances > 1)}, {kind}", name, results)


def run(bed: Testbed, policy: Policy, arrivals: list[Arrivals]) -> list[float]:
    """Return seconds from arrival to delivery at all ranks of every request of every instance."""
    num_rails = bed.layout.num_rails
    ranks_per_instance = num_rails // len(arrivals)
    with Crew(bed, policy) as crew, ExitStack() as waiting:
        senders = crew.hire(*((0, worker) for worker in range(num_rails)))
        receivers = crew.hire(*((1, worker) for worker in range(num_rails)))
        crew.connect(list(zip(senders, receivers, strict=True)))
        for receiver in receivers:
            receiver.begin(roles.sink, max(max(each.sizes) for each in arrivals))
            waiting.callback(receiver.result)
        begin = time.monotonic() + START_S
        for worker, sender in enumerate(senders):
            each = arrivals[worker // ranks_per_instance]
            sender.begin(roles.stream, begin, each.times_s, each.sizes)
        by_rank = [sender.result() for sender in senders]
    instances = [by_rank[i : i + ranks_per_instance] for i in range(0, num_rails, ranks_per_instance)]
    return [max(ranks) for instance in instances for ranks in zip(*instance, strict=True)]
