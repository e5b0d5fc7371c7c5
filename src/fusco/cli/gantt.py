"""Gantt chart of stages in a terminal: a line for each sender, a letter for each receiver."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
NUM_LETTERS = len(_LETTERS)
_COLORS = ("blue", "green", "magenta", "cyan", "yellow", "red", "bright_blue", "bright_green", "bright_magenta")
_IDLE = "·"


def node_letter(node: int) -> str:
    """Return one character for a node: digits, then letters, then ``#`` for all others.

    >>> node_letter(3), node_letter(10), node_letter(99)
    ('3', 'A', '#')
    """
    return _LETTERS[node] if node < NUM_LETTERS else "#"


def draw_gantt(
    dst_node: Sequence[Sequence[int]],
    num_bytes: Sequence[Sequence[int]],
    duration_bytes: Sequence[int],
    width: int,
    max_nodes: int | None = None,
) -> list[Text]:
    """Return a ruler with a mark at the start of each stage, then a line for each node, ``width`` characters wide.

    With ``max_nodes``, only the first nodes have a line. The width of a stage is proportional to its length: the letter
    of the receiver while the node sends, dots while it waits. Stages shorter than a character are not visible.

    >>> for line in draw_gantt([[1, 0], [-1, 0]], [[6, 3], [0, 2]], [6, 2], width=8):
    ...     print(line)
       |     |
    0  111111··
    1  000···00
    """
    *begins, total = accumulate(duration_bytes, initial=0)

    def column(size: int) -> int:
        return (size * width + total // 2) // total if total else 0

    ruler = [" "] * width
    for begin in begins:
        ruler[min(column(begin), width - 1)] = "|"
    lines = [Text("   " + "".join(ruler).rstrip(), style="dim")]
    for node in range(len(dst_node[0]) if dst_node else 0)[:max_nodes]:
        line = Text(f"{node:<3}")
        for stage, begin in enumerate(begins):
            dst, size = dst_node[stage][node], num_bytes[stage][node]
            first, end = column(begin), column(begin + duration_bytes[stage])
            num_busy = column(begin + size) - first
            if dst >= 0:
                line.append(node_letter(dst) * num_busy, style=_COLORS[dst % len(_COLORS)])
            line.append(_IDLE * (end - first - (num_busy if dst >= 0 else 0)), style="dim")
        lines.append(line)
    return lines
