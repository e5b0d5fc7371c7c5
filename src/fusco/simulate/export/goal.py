"""GOAL text: labelled sends and receives of each rank, and which requires which; LogGOPSim reads it by txt2bin.

The syntax is that of LogGOPSim (Hoefler et al., 2010), whose txt2bin (commit 76451de) read such files: ``l1: send 8b to
1 tag 3``, ``l2 requires l1``, a label before it is required, and no line indented.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fusco.core.files import written_beside
from fusco.simulate.messages import Messages


def write_goal(messages: Messages, path: Path) -> None:
    """Write a program: message ``i`` is label ``2 i`` of its sender and ``2 i + 1`` of its receiver, with tag ``i``."""
    lines = [f"num_ranks {messages.num_ranks}", ""]
    for rank in range(messages.num_ranks):
        lines.append(f"rank {rank} {{")
        for i in np.flatnonzero((messages.src == rank) | (messages.dst == rank)).tolist():
            size = int(messages.num_bytes[i])
            if messages.src[i] == rank:
                lines.append(f"l{2 * i}: send {size}b to {messages.dst[i]} tag {i}")
                lines += [f"l{2 * i} requires l{2 * each + 1}" for each in messages.awaited(i).tolist()]
            else:
                lines.append(f"l{2 * i + 1}: recv {size}b from {messages.src[i]} tag {i}")
        lines += ["}", ""]
    with written_beside(path) as beside:
        beside.write_text("\n".join(lines), encoding="utf-8")
