"""Long flows that borrow rails, alone or with a victim that owns one of them (FuseLink, Figures 7, 9 and Table 2)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fusco.bench.rails import roles
from fusco.bench.rails.crew import START_S, VARIANTS, Crew, Member, perform
from fusco.bench.rails.record import CaseResult, line_rate, percentile_ms, scaled
from fusco.rails import POLICIES, Policy
from fusco.testbed import Testbed


@dataclass(frozen=True)
class Contention:
    """Traffic: ``num_flows`` workers send all the time, one more sends ``victim_bytes`` every ``period_s`` seconds.

    Bytes are for rails of 2 Gbit/s, and in proportion for others.
    """

    num_flows: int
    victim_bytes: int
    period_s: float

    def __str__(self) -> str:
        flows = f"{self.num_flows} flow{'s' * (self.num_flows > 1)}"
        return f"{flows}, victim {self.victim_bytes / 1e6:.0f} MB / {1e3 * self.period_s:.0f} ms"


CASES = (Contention(1, 16_000_000, 0.3), Contention(3, 2_000_000, 0.05), Contention(3, 16_000_000, 0.3))
# Table 2 in steps: each adds one thing to the one before.
STEPS = {
    "direct rail only": POLICIES["direct"],
    "+ all rails, without control": POLICIES["spray"],
    "+ monitors, bound per worker (FuseLink)": POLICIES["fuselink-paper"],
    "+ activity instead of completions": Policy("activity", bound="worker"),
    "+ bound shared by all workers": Policy("shared"),
    "+ lower priority (fuselink)": POLICIES["fuselink"],
}


def measure_bandwidth(bed: Testbed, policies: list[str], seconds: float) -> Iterator[CaseResult]:
    """Measure a flow of one worker for each policy and number of rails."""
    for name in policies:
        for num_rails in [1] if name == "direct" else range(1, bed.layout.num_rails + 1):
            speed, carried = run_alone(bed, VARIANTS[name], num_rails, seconds)
            fair = sum(carried) / num_rails
            results = {
                "GB/s": speed,
                "of line rate": speed / (num_rails * line_rate(bed)),
                "least share": min(carried) / fair,
                "largest share": max(carried) / fair,
            }
            yield CaseResult(f"{num_rails} rail{'s' * (num_rails > 1)}", name, results)


def run_alone(bed: Testbed, policy: Policy, num_rails: int, seconds: float) -> tuple[float, list[int]]:
    """Return the GB/s of a flow of one worker, and the bytes that each rail has carried."""
    with Crew(bed, policy, num_rails=num_rails) as crew:
        (sender,), (receiver,) = crew.hire_pairs(1)
        before = [bed.counters(0, rail).sent_bytes for rail in range(num_rails)]
        begin = time.monotonic() + START_S
        _, speed = perform((receiver, roles.sink), (sender, roles.flow, begin, seconds))
        return speed, [bed.counters(0, rail).sent_bytes - sent for rail, sent in enumerate(before)]


def measure_contention(bed: Testbed, policies: list[str], seconds: float) -> Iterator[CaseResult]:
    """Measure each case that the testbed has rails for with each policy."""
    for case in CASES:
        if case.num_flows < bed.layout.num_rails:
            for name in policies:
                yield CaseResult(str(case), name, run(bed, VARIANTS[name], case, seconds))


def measure_steps(bed: Testbed, _policies: list[str], seconds: float) -> Iterator[CaseResult]:
    """Measure the design step by step: three flows and a victim."""
    case = Contention(bed.layout.num_rails - 1, 2_000_000, 0.05)
    for name, policy in STEPS.items():
        yield CaseResult(str(case), name, run(bed, policy, case, seconds))


def measure_incast(bed: Testbed, policies: list[str], seconds: float) -> Iterator[CaseResult]:
    """Measure a flow of host 0 and a victim of host 2, both to host 1, with and without its idle rails in its credits.

    The victim's rail is idle on host 0, so only the receiver knows that it is busy.
    """
    variants = [VARIANTS[name] for name in policies]
    variants += [
        replace(policy, name=f"{policy.name}, no mask", heeds_receiver=False)
        for policy in variants
        if policy.rule == "fuselink" and policy.name != "nccl"
    ]
    for policy in variants:
        with Crew(bed, policy, num_rails=2) as crew:
            senders, sinks = crew.hire((0, 0), (2, 1)), crew.hire((1, 0), (1, 1))
            crew.connect(list(zip(senders, sinks, strict=True)))
            of_victim, speed = send(senders, sinks, scaled(16_000_000, bed), 0.3, seconds)
        yield CaseResult("victim of another host, 16 MB / 300 ms", policy.name, {**of_victim, "flow GB/s": speed})


def run(bed: Testbed, policy: Policy, case: Contention, seconds: float) -> dict[str, float]:
    """Run flows and victim; each has a sink of the same number on the other host."""
    num_rails, victim_bytes = case.num_flows + 1, scaled(case.victim_bytes, bed)
    with Crew(bed, policy, num_rails=num_rails) as crew:
        senders, sinks = crew.hire_pairs(num_rails)
        of_victim, speed = send(senders, sinks, victim_bytes, case.period_s, seconds)
    left = num_rails * line_rate(bed) - victim_bytes / case.period_s / 1e9
    return {**of_victim, "flows GB/s": speed, "of what is left": speed / left}


def send(
    senders: Sequence[Member], sinks: Sequence[Member], victim_bytes: int, period_s: float, seconds: float
) -> tuple[dict[str, float], float]:
    """Send as flows and, the last sender, as the victim; return the victim's results, and the GB/s of all flows."""
    *flows, victim = senders
    begin, warm_up = time.monotonic() + START_S, min(0.5, seconds / 4)
    arrivals = [i * period_s for i in range(max(1, int((seconds - warm_up) / period_s)))]
    *results, latencies = perform(
        *((sink, roles.sink) for sink in sinks),
        *((flow, roles.flow, begin, seconds) for flow in flows),
        (victim, roles.stream, begin + warm_up, arrivals, [victim_bytes] * len(arrivals)),
    )
    speed = sum(results[len(sinks) :])
    means = {"victim mean ms": 1e3 * sum(latencies) / len(latencies), "victim p99 ms": percentile_ms(latencies, 99)}
    return means, speed
