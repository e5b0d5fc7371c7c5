"""Prefill hands its cache to decode: 4, 2 or 1 serving instances on the rails of a host (FuseLink, Table 4)."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fusco.bench.inputs.arrays import PROMPTS, load_shipped
from fusco.bench.rails import roles
from fusco.bench.rails.crew import START_S, VARIANTS, Crew, perform
from fusco.bench.rails.record import CaseResult, line_rate, percentile_ms
from fusco.rails import Policy
from fusco.testbed import Testbed

_LOAD = 0.5
_SIGMA = 0.8  # of the logarithm of sizes: their coefficient of variation is that of the prompts in Azure's trace, 0.96
_MEAN_S = 0.1  # of a request on its direct rail: 25 MB at 2 Gbit/s


@dataclass(frozen=True)
class Arrivals:
    """Requests of one instance: seconds from the beginning, and bytes of each rank."""

    times_s: list[float]
    sizes: list[int]


def poisson(seconds: float, load: float, bytes_per_s: float, mean_bytes: int, seed: int) -> Arrivals:
    """Return Poisson arrivals of log-normal sizes that keep a rail of ``bytes_per_s`` busy for a share ``load``."""
    rng = random.Random(seed)  # noqa: S311  no secret
    times, sizes, now = [], [], 0.0
    mu = np.log(mean_bytes) - _SIGMA**2 / 2
    while (now := now + rng.expovariate(load * bytes_per_s / mean_bytes)) < seconds:
        times.append(now)
        sizes.append(max(1, int(rng.lognormvariate(mu, _SIGMA))))
    # Sizes are scaled so that short runs have the load, too; their sum varies much from seed to seed.
    scale = load * bytes_per_s * seconds / max(1, sum(sizes))
    return Arrivals(times, [max(1, int(size * scale)) for size in sizes])


def azure(seconds: float, load: float, bytes_per_s: float, mean_bytes: int, instance: int) -> Arrivals:
    """Return arrivals and prompt lengths of Azure's conversation trace, scaled to mean size and load.

    Instances have successive parts of the trace.
    """
    trace = load_shipped(PROMPTS)
    seconds_of_trace, tokens = trace["arrival_s"], trace["context_tokens"]
    count = max(1, round(load * bytes_per_s * seconds / mean_bytes))
    part = slice(instance * count, (instance + 1) * count)
    times, lengths = seconds_of_trace[part] - seconds_of_trace[part][0], tokens[part]
    scale = seconds * (1 - 1 / count) / max(times[-1], 1e-9)
    sizes = np.maximum(1, lengths * (mean_bytes / lengths.mean())).astype(int)
    return Arrivals([float(each * scale) for each in times], [int(size) for size in sizes])


def measure_serving(bed: Testbed, policies: list[str], seconds: float) -> Iterator[CaseResult]:
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
            yield CaseResult(f"{instances} instance{'s' * (instances > 1)}, {kind}", name, results)


def run(bed: Testbed, policy: Policy, arrivals: list[Arrivals]) -> list[float]:
    """Return seconds from arrival to delivery at all ranks of every request of every instance."""
    num_rails = bed.layout.num_rails
    ranks_per_instance = num_rails // len(arrivals)
    with Crew(bed, policy) as crew:
        senders, receivers = crew.hire_pairs(num_rails)
        largest, begin = max(max(each.sizes) for each in arrivals), time.monotonic() + START_S
        results = perform(
            *((receiver, roles.sink, largest) for receiver in receivers),
            *(
                (sender, roles.stream, begin, (each := arrivals[worker // ranks_per_instance]).times_s, each.sizes)
                for worker, sender in enumerate(senders)
            ),
        )
    by_rank = results[num_rails:]
    instances = [by_rank[i : i + ranks_per_instance] for i in range(0, num_rails, ranks_per_instance)]
    return [max(ranks) for instance in instances for ranks in zip(*instance, strict=True)]
