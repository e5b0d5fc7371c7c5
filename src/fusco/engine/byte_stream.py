"""Byte streams of segments between ranks: ``gather_send``, ``scatter_recv``, and ``shuffle`` without lanes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from fusco.core.errors import MismatchError
from fusco.core.segments import Segments
from fusco.engine.tasks import Task

# Returns the tasks that send segments to some ranks and receive segments from some.
MakeTasks = Callable[[Mapping[int, Segments], Mapping[int, Segments]], list[Task]]


def in_turn(rank: int, partners: Mapping[int, Segments]) -> list[tuple[int, Segments]]:
    """Sort partners, the next rank first, so that receivers take turns.

    >>> nothing = Segments(torch.empty(0), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    >>> [peer for peer, _ in in_turn(1, {0: nothing, 1: nothing, 2: nothing})]
    [1, 2, 0]
    """
    return sorted(partners.items(), key=lambda entry: (entry[0] < rank, entry[0]))


def run_stream(
    name: str,
    send: Mapping[int, Segments],
    receive: Mapping[int, Segments],
    make_tasks: MakeTasks,
    run: Callable[[Sequence[Task]], None],
) -> None:
    """Send segments to one rank, or receive from one: both sides first exchange what they do, and how many bytes.

    ``run`` runs tasks, ``name`` is for the ``MismatchError`` that both raise if both send, both receive, or the numbers
    differ.
    """
    ((peer, segments),) = (*send.items(), *receive.items())
    num_bytes, device = segments.total_bytes, segments.base.device
    # A receiver's number is inverted, and so negative.
    ours, theirs = _int64_segment(num_bytes if send else ~num_bytes, device), _int64_segment(0, device)
    run(make_tasks({peer: ours}, {peer: theirs}))
    of_peer = int(theirs.base[0])
    if (of_peer >= 0) is bool(send):
        raise MismatchError(f"{name}: that rank calls {'gather_send' if send else 'scatter_recv'}, too")
    if max(of_peer, ~of_peer) != num_bytes:
        raise MismatchError(
            f"{name}: this rank has {num_bytes} bytes of segments, that rank has {max(of_peer, ~of_peer)} bytes"
        )
    run(make_tasks(send, receive))


def _int64_segment(value: int, device: torch.device) -> Segments:
    first, size = torch.tensor([0], device="cpu"), torch.tensor([8], device="cpu")
    return Segments(torch.tensor([value], device=device), first, size)
