"""Connection matrices of csg-htsim (``.cm``): connections with sizes, and triggers that start them.

``Nodes``, ``Connections`` and ``Triggers`` are counts; a connection is ``src->dst id i start 0 size s``, or has
``trigger t`` in place of ``start``, and ``send_done_trigger t``. A trigger is ``barrier`` of ``count`` connections.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fusco.core.files import written_beside
from fusco.simulate.messages import Messages


def write_htsim(messages: Messages, path: Path) -> None:
    """Write a connection for each message; those of a hop start when a barrier of its last earlier hop has ended.

    A connection has one trigger that it counts down, so hops wait as wholes: later than messages do here. csg-htsim
    reads sizes as 32-bit integers: ``ValueError`` for a message that is larger.
    """
    if (most := int(messages.num_bytes.max(initial=0))) >= 1 << 31:
        raise ValueError(f"csg-htsim reads connections below 2 GiB, this has one of {most:,} bytes")
    starts = [max(after, default=-1) for after in messages.after]
    awaited = {each: i + 1 for i, each in enumerate(sorted({start for start in starts if start >= 0}))}
    counts = np.bincount(messages.hop, minlength=len(starts))
    lines = [f"Nodes {messages.num_ranks}", f"Connections {len(messages.hop)}", f"Triggers {len(awaited)}"]
    for i, (hop, src, dst, size) in enumerate(
        zip(
            *(column.tolist() for column in (messages.hop, messages.src, messages.dst, messages.num_bytes)), strict=True
        )
    ):
        start = f"trigger {awaited[starts[hop]]}" if starts[hop] >= 0 else "start 0"
        done = f" send_done_trigger {awaited[hop]}" if hop in awaited else ""
        lines.append(f"{src}->{dst} id {i + 1} {start} size {size}{done}")
    lines += [f"trigger id {number} barrier count {counts[hop]}" for hop, number in awaited.items()]
    with written_beside(path) as beside:
        beside.write_text("\n".join([*lines, ""]), encoding="utf-8")
