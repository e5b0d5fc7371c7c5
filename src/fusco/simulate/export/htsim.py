"""Connection matrices of csg-htsim (``.cm``): connections with sizes, and triggers that start them.

``Nodes``, ``Connections`` and ``Triggers`` are counts; a connection is ``src->dst id i start 0 size s``, or has
``trigger t`` in place of ``start``, and ``send_done_trigger t``. A trigger is ``barrier`` of ``count`` connections.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from fusco.core.files import written_beside
from fusco.core.lanes import IntArray
from fusco.simulate.messages import Messages

_CONNECTION = re.compile(r"(\d+)->(\d+) id \d+ (?:start 0|trigger \d+) size (\d+)(?: send_done_trigger \d+)?")


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


def read_htsim(path: Path) -> IntArray:
    """Return the bytes that ranks send each other, int64 (R, R); ``ValueError`` if connections are missing."""
    lines = path.read_text(encoding="utf-8").splitlines()
    num_ranks, num_connections = (int(line.split()[1]) for line in lines[:2])
    matrix = np.zeros((num_ranks, num_ranks), np.int64)
    found = [match for line in lines if (match := _CONNECTION.fullmatch(line))]
    for match in found:
        src, dst, size = map(int, match.groups())
        matrix[src, dst] += size
    if len(found) != num_connections:
        raise ValueError(f"{path} has {len(found)} connections, its head says {num_connections}")
    return matrix
