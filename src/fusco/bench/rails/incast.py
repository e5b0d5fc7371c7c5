"""Two hosts send to one: with and without the receiver's idle rails in its credits (FuseLink, section 4.3.2)."""

from __future__ import annotations

import time
from dataclasses import replace

from fusco.bench.rails import roles
from fusco.bench.rails.bandwidth import START_S
from fusco.bench.rails.crew import VARIANTS, Crew
from fusco.bench.rails.record import Report, percentile_ms, scaled
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
            flow, victim, flow_sink, victim_sink = crew.hire((0, 0), (2, 1), (1, 0), (1, 1))
            crew.connect([(flow, flow_sink), (victim, victim_sink)])
            for each in (flow_sink, victim_sink):
                each.begin(roles.sink, 16 << 20)
            begin, warm_up = time.monotonic() + START_S, min(0.5, seconds / 4)
            arrivals = [i * _PERIOD_S for i in range(max(1, int((seconds - warm_up) / _PERIOD_S)))]
            flow.begin(roles.flow, begin, seconds)
            victim.begin(roles.stream, begin + warm_up, arrivals, [scaled(_VICTIM_BYTES, bed)] * len(arrivals))
            latencies, speed = victim.result(), flow.result().gbytes_per_s
            for each in (flow_sink, victim_sink):
                each.result()
        results = {
            "victim mean ms": 1e3 * sum(latencies) / len(latencies),
            "victim p99 ms": percentile_ms(latencies, 99),
            "flow GB/s": speed,
        }
        report("victim of another host, 16 MB / 300 ms", policy.name, results)
