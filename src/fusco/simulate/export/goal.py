"""GOAL text: labelled sends and receives of each rank, and which requires which; LogGOPSim reads it by txt2bin.

The syntax is that of LogGOPSim (Hoefler et al., 2010), whose txt2bin (commit 76451de) read such files: ``l1: send 8b to
1 tag 3``, ``l2 requires l1``, a label before it is required, and no line indented.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from fusco.core.files import written_beside
from fusco.core.lanes import IntArray
from fusco.simulate.messages import Messages

_TRANSFER = re.compile(r"l(\d+): (send|recv) (\d+)b (?:to|from) (\d+) tag (\d+)")


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


def read_goal(path: Path) -> IntArray:
    """Return the bytes that ranks send each other, int64 (R, R); ``ValueError`` if a receive differs from its send."""
    lines = path.read_text(encoding="utf-8").splitlines()
    num_ranks, rank = int(lines[0].split()[1]), -1
    tables = {kind: np.zeros((num_ranks, num_ranks), np.int64) for kind in ("send", "recv")}
    for line in lines:
        if line.startswith("rank "):
            rank = int(line.split()[1])
        elif found := _TRANSFER.fullmatch(line):
            _, kind, size, peer, _ = found.groups()
            ends = (rank, int(peer)) if kind == "send" else (int(peer), rank)
            tables[kind][ends] += int(size)
    if not np.array_equal(tables["send"], tables["recv"]):
        raise ValueError(f"{path}: sends and receives differ")
    return tables["send"]
