"""Messages of a program between and within nodes, with what each waits for: what exports write."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusco.core.lanes import IntArray
from fusco.simulate.flows import MOST_FLOWS, Hop, Program


@dataclass(frozen=True, eq=False)
class Messages:
    """Messages by number, int64 (M,) each, in order of hops; those of one hop that have bytes.

    ``hop`` is the number of a message's hop. A message waits for all messages of the hops in ``after`` of its hop
    that its source receives.
    """

    hop: IntArray
    src: IntArray
    dst: IntArray
    num_bytes: IntArray
    after: tuple[tuple[int, ...], ...]
    num_ranks: int

    def awaited(self, message: int) -> IntArray:
        """Return the messages that must have arrived at a message's source before it is sent."""
        earlier = np.isin(self.hop, self.after[self.hop[message]])
        awaited: IntArray = np.flatnonzero(earlier & (self.dst == self.src[message]))
        return awaited


def messages_of(program: Program, num_ranks: int) -> Messages:
    """Return the messages of a program; passes over memory are left out, and so are links: routes are the reader's.

    What another rank's NIC sends or receives is a message of its own, after the one that brings it there. Raises
    ``ValueError`` for more than ``MOST_FLOWS`` whose flows are merged.
    """
    if program.is_merged:
        raise ValueError(f"{program.num_flows:,} messages are too many to write, at most {MOST_FLOWS:,} are")
    parts: list[Hop] = []
    after: list[tuple[int, ...]] = []
    last: dict[int, tuple[int, ...]] = {}  # by hop of the program, the parts that end it
    for i in _in_order(program):
        hop = program.hops[i]
        before = tuple(part for each in hop.after for part in last[each])
        num_before = len(before)
        if hop.kind in ("memory", "cores"):
            last[i] = before
            continue
        ends = [hop.src, hop.src if hop.via is None else hop.via, hop.dst if hop.until is None else hop.until, hop.dst]
        for src, dst, kind in zip(ends, ends[1:], ("within", hop.kind, "within"), strict=False):
            moves = (src != dst) & (hop.num_bytes > 0)
            if not moves.any():
                continue
            parts.append(Hop(name=hop.name, kind=kind, src=src[moves], dst=dst[moves], num_bytes=hop.num_bytes[moves]))
            after.append(before)
            before = (*before, len(parts) - 1)
        last[i] = before[-1:] if len(before) > num_before else ()
    number = np.repeat(np.arange(len(parts)), [len(part.src) for part in parts])
    nothing = np.zeros(0, np.int64)
    columns = [np.concatenate([nothing, *(getattr(p, name) for p in parts)]) for name in ("src", "dst", "num_bytes")]
    src, dst, num_bytes = columns
    return Messages(number, src, dst, num_bytes, tuple(after), num_ranks)


def _in_order(program: Program) -> list[int]:
    """Return the hops so that none is before one that it waits for."""
    order: list[int] = []
    while len(order) < len(program.hops):
        order += [i for i, hop in enumerate(program.hops) if i not in order and set(hop.after) <= set(order)]
    return order
