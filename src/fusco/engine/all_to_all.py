"""All-to-all on any device: makes the rank schedule from the sizes of all ranks, and cuts its flows into messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fusco.core.errors import MismatchError
from fusco.core.lanes import IntArray
from fusco.core.topology import ScheduleMode, Topology
from fusco.engine.base import AllToAllRequest, ShuffleRequest
from fusco.schedule.cost import Links, are_lanes_worth_it, schedule_for
from fusco.schedule.rank_schedule import Flow, RankSchedule, make_rank_schedule


def plan_all_to_all(
    request: AllToAllRequest, counts: Sequence[Sequence[int]], topology: Topology, rank: int, links: Links
) -> RankSchedule:
    """Return this rank's part of the schedule, which is the same on all ranks.

    ``counts`` are those of all ranks' requests. The mode is chosen by ``links``, unless the request names one. Raises
    ``MismatchError`` on all ranks if any rank expects another size than its peer sends.
    """
    rank_rows = _sent_sizes(counts, topology, "all_to_all", "rows")
    return _rank_schedule((rank_rows * request.row_bytes).tobytes(), topology, rank, links, request.mode)


def plan_shuffle(
    request: ShuffleRequest,
    counts: Sequence[Sequence[int]],
    topology: Topology,
    rank: int,
    slice_bytes: int,
    links: Links,
) -> RankSchedule | None:
    """Return this rank's part of a shuffle with lanes; ``None``, on all ranks, if each sends its segments itself.

    The shuffle is an all-to-all whose input and output are ``request.of_others``; what a rank has for itself needs no
    schedule. ``counts``, ``links`` and errors are those of ``plan_all_to_all``.
    """
    rank_bytes = _sent_sizes(counts, topology, "shuffle", "bytes")
    if not (request.has_lanes and are_lanes_worth_it(rank_bytes, topology, slice_bytes, links.lane_links)):
        return None
    np.fill_diagonal(rank_bytes, 0)
    return _rank_schedule(rank_bytes.tobytes(), topology, rank, links, None)


@lru_cache(maxsize=8)
def _rank_schedule(
    rank_bytes: bytes, topology: Topology, rank: int, links: Links, mode: ScheduleMode | None
) -> RankSchedule:
    """Return a rank's part of the schedule of a matrix, int64; kept, as calls often repeat the sizes of earlier ones.

    It takes 0.2 ms for two ranks, half of a call of 64 rows (two cores of an AMD EPYC).
    """
    matrix = np.frombuffer(rank_bytes, np.int64).reshape(topology.world_size, -1)
    return make_rank_schedule(schedule_for(matrix, topology, links, mode), rank)


def _sent_sizes(counts: Sequence[Sequence[int]], topology: Topology, verb: str, unit: str) -> IntArray:
    """Return what each rank sends to each other; raise ``MismatchError`` unless that is what the other expects."""
    table = np.array(counts, np.int64)
    sent, expected = table[:, : len(table)], table[:, len(table) :].T
    if sent.tobytes() != expected.tobytes():  # quicker than to compare small arrays
        of = topology.numbers
        differing = [
            f"rank {of[src]} sends {sent[src, dst]} {unit} to rank {of[dst]}, which expects {expected[src, dst]}"
            for src, dst in np.argwhere(sent != expected)
        ]
        raise MismatchError(f"ranks disagree in {verb}: {'; '.join(differing)}")
    return sent


class MemorySpan(NamedTuple):
    """Contiguous bytes in one memory of a rank."""

    memory: int  # index of the memory, as in ``fusco.schedule.rank_schedule``
    offset: int  # first byte in the memory
    num_bytes: int  # size
    region: int  # region of the memory, -1 for none

    @property
    def end(self) -> int:
        """Offset behind the last byte."""
        return self.offset + self.num_bytes


@dataclass(frozen=True, eq=False)
class FlowSlice:
    """Message of a flow: at most one slice of it."""

    peer: int  # the other rank
    num_bytes: int  # total size of all spans
    spans: list[MemorySpan]  # source or target of the bytes on this rank, in order


def cut_flow(flow: Flow, slice_bytes: int) -> Iterator[FlowSlice]:
    """Cut a flow into messages of ``slice_bytes``, the last one shorter, and join adjacent pieces.

    Both ends cut at the same bytes, whatever the addresses.

    >>> import numpy as np
    >>> from fusco.schedule.rank_schedule import INPUT
    >>> pieces = np.array([[INPUT, 0, 3, -1], [INPUT, 3, 2, -1], [INPUT, 9, 2, -1]])
    >>> [[tuple(span) for span in message.spans] for message in cut_flow(Flow(1, 0, pieces), 4)]
    [[(0, 0, 4, -1)], [(0, 4, 1, -1), (0, 9, 2, -1)]]
    """
    spans: list[MemorySpan] = []
    room = slice_bytes
    for memory, offset, num_bytes, region in flow.pieces.tolist():
        while num_bytes:
            size = min(num_bytes, room)
            last = spans[-1] if spans else None
            if last and (memory, offset, region) == (last.memory, last.end, last.region):
                spans[-1] = last._replace(num_bytes=last.num_bytes + size)
            else:
                spans.append(MemorySpan(memory, offset, size, region))
            offset, num_bytes, room = offset + size, num_bytes - size, room - size  # noqa: PLW2901  what is left
            if not room:
                yield FlowSlice(flow.peer, slice_bytes, spans)
                spans, room = [], slice_bytes
    if spans:
        yield FlowSlice(flow.peer, slice_bytes - room, spans)
