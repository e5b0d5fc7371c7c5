"""All-to-all on any device: the rank schedule from the sizes of all ranks, and its flows cut into messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fusco.core.topology import Topology
from fusco.engine.base import AllToAllRequest
from fusco.engine.byte_stream import StreamSizes, check_sizes
from fusco.schedule.choice import schedule_for
from fusco.schedule.cost import Links
from fusco.schedule.rank_schedule import Flow, RankSchedule, make_rank_schedule


def sizes_of(request: AllToAllRequest) -> StreamSizes:
    """What a rank tells the others of its request, in rows."""
    return StreamSizes(tuple(request.send_rows), tuple(request.receive_rows))


def plan_all_to_all(
    request: AllToAllRequest, counts: Sequence[Sequence[int]], topology: Topology, rank: int, links: Links
) -> RankSchedule:
    """What this rank does, by a schedule that all ranks make alike.

    Args:
        request: of this rank.
        counts: the packed ``StreamSizes`` of all ranks.
        topology: which ranks share a node.
        rank: this rank.
        links: by which a schedule is chosen unless the request names one.

    Raises:
        MismatchError: on all ranks, unless everybody expects what the others send.

    """
    sizes = list(map(StreamSizes.unpack, counts))
    check_sizes(sizes, "all_to_all", "rows")
    rank_rows = np.array([of_rank.send for of_rank in sizes], dtype=np.int64)
    schedule = schedule_for(rank_rows * request.row_bytes, topology, links, request.mode)
    return make_rank_schedule(schedule, rank)


@dataclass(frozen=True, eq=False)
class FlowSlice:
    """At most a slice of a flow, sent at once.

    Attributes:
        peer: the other rank.
        num_bytes: of all spans.
        spans: contiguous pieces as (memory, offset, num_bytes, region).

    """

    peer: int
    num_bytes: int
    spans: list[tuple[int, int, int, int]]


def cut_flow(flow: Flow, slice_bytes: int) -> Iterator[FlowSlice]:
    """Cut a flow into messages of ``slice_bytes``, the last one shorter, and join pieces that touch.

    Both ends cut at the same bytes, wherever these stand.

    >>> import numpy as np
    >>> from fusco.schedule.rank_schedule import INPUT
    >>> pieces = np.array([[INPUT, 0, 3, -1], [INPUT, 3, 2, -1], [INPUT, 9, 2, -1]])
    >>> [message.spans for message in cut_flow(Course(1, 0, pieces), 4)]
    [[(0, 0, 4, -1)], [(0, 4, 1, -1), (0, 9, 2, -1)]]
    """
    spans: list[tuple[int, int, int, int]] = []
    room = slice_bytes
    for memory, offset, num_bytes, region in flow.pieces.tolist():
        while num_bytes:
            size = min(num_bytes, room)
            before = spans[-1] if spans else (-1, -1, 0, -1)
            if (memory, offset, region) == (before[0], before[1] + before[2], before[3]):
                spans[-1] = (memory, before[1], before[2] + size, region)
            else:
                spans.append((memory, offset, size, region))
            offset, num_bytes, room = offset + size, num_bytes - size, room - size  # noqa: PLW2901  the rest
            if not room:
                yield FlowSlice(flow.peer, slice_bytes, spans)
                spans, room = [], slice_bytes
    if spans:
        yield FlowSlice(flow.peer, slice_bytes - room, spans)
