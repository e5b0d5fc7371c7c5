"""Bandwidth of one worker over 1 to all rails of its host, all idle (FuseLink, Figure 9)."""

from __future__ import annotations

import time

from fusco.bench.rails import roles
from fusco.bench.rails.crew import START_S, VARIANTS, Crew
from fusco.bench.rails.record import Report, line_rate
from fusco.testbed import Testbed


def measure_bandwidth(bed: Testbed, policies: list[str], seconds: float, report: Report) -> None:
    """Measure a flow of one worker for each policy and number of rails."""
    for name in policies:
        for num_rails in [1] if name == "direct" else range(1, bed.layout.num_rails + 1):
            with Crew(bed, VARIANTS[name], num_rails=num_rails) as crew:
                (sender,), (receiver,) = crew.hire_pairs(1)
                before = [bed.counters(0, rail).sent_bytes for rail in range(num_rails)]
                receiver.begin(roles.sink)
                sender.begin(roles.flow, time.monotonic() + START_S, seconds)
                speed = sender.result()
                receiver.result()
                carried = [bed.counters(0, rail).sent_bytes - before[rail] for rail in range(num_rails)]
            fair = sum(carried) / num_rails
            results = {
                "GB/s": speed,
                "of line rate": speed / (num_rails * line_rate(bed)),
                "least share": min(carried) / fair,
                "largest share": max(carried) / fair,
            }
            report(f"{num_rails} rail{'s' * (num_rails > 1)}", name, results)
