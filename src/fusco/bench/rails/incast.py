"""Two hosts send to one: with and without the receiver's idle rails in its credits (FuseLink, section 4.3.2)."""

from __future__ import annotations

from dataclasses import replace

from fusco.bench.rails.contention import send
from fusco.bench.rails.crew import VARIANTS, Crew
from fusco.bench.rails.record import Report, scaled
from fusco.testbed import Testbed

_VICTIM_BYTES, _PERIOD_S = 16_000_000, 0.3


def measure_incast(bed: Testbed, policies: list[str], seconds: float, report: Report) -> None:
    """Measure a flow of host 0 and a victim of host 2, both to host 1.

    The victim's rail is idle on host 0, so only the receiver knows that it is busy.
    """
    variants = [VARIANTS[name] for name in policies]
    variants += [
        replace(policy, name=f"{policy.name}, no mask", heeds_receiver=False)
        for policy in variants
        if policy.monitored and policy.name != "nccl"
    ]
    for policy in variants:
        with Crew(bed, policy, num_rails=2) as crew:
            senders, sinks = crew.hire((0, 0), (2, 1)), crew.hire((1, 0), (1, 1))
            crew.connect(list(zip(senders, sinks, strict=True)))
            of_victim, speed = send(senders, sinks, scaled(_VICTIM_BYTES, bed), _PERIOD_S, seconds)
        report("victim of another host, 16 MB / 300 ms", policy.name, {**of_victim, "flow GB/s": speed})
