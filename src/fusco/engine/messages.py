"""Courses cut into messages: what travels between two ranks at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fusco.schedule.itinerary import Course


@dataclass(frozen=True, eq=False)
class CourseSlice:
    """At most a slice of a course, sent at once.

    Attributes:
        peer: the other rank.
        num_bytes: of all spans.
        spans: contiguous pieces as (memory, offset, num_bytes, region).

    """

    peer: int
    num_bytes: int
    spans: list[tuple[int, int, int, int]]


def cut(course: Course, slice_bytes: int) -> Iterator[CourseSlice]:
    """Cut a course into messages of ``slice_bytes``, the last one shorter, and join pieces that touch.

    Both ends cut at the same bytes, wherever these stand.

    >>> import numpy as np
    >>> from fusco.schedule.itinerary import INPUT
    >>> pieces = np.array([[INPUT, 0, 3, -1], [INPUT, 3, 2, -1], [INPUT, 9, 2, -1]])
    >>> [message.spans for message in cut(Course(1, 0, pieces), 4)]
    [[(0, 0, 4, -1)], [(0, 4, 1, -1), (0, 9, 2, -1)]]
    """
    spans: list[tuple[int, int, int, int]] = []
    room = slice_bytes
    for memory, offset, num_bytes, region in course.pieces.tolist():
        while num_bytes:
            size = min(num_bytes, room)
            before = spans[-1] if spans else (-1, -1, 0, -1)
            if (memory, offset, region) == (before[0], before[1] + before[2], before[3]):
                spans[-1] = (memory, before[1], before[2] + size, region)
            else:
                spans.append((memory, offset, size, region))
            offset, num_bytes, room = offset + size, num_bytes - size, room - size  # noqa: PLW2901  the rest
            if not room:
                yield CourseSlice(course.peer, slice_bytes, spans)
                spans, room = [], slice_bytes
    if spans:
        yield CourseSlice(course.peer, slice_bytes - room, spans)
