"""What DeepEP's three classes have in common.

Everything runs on the current stream: previous events are waited for first, and an event that a call returns is
recorded after it. Nothing has gradients: frameworks call these methods from their own autograd functions. An error on
one rank is told to all others in the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
import torch.distributed as dist

from fusco.core.config import Launch, Settings
from fusco.integrations.along_handles import SentHandle, biases_of
from fusco.integrations.deep_ep.events import EventHandle, EventOverlap, wait_for
from fusco.integrations.deep_ep.rank_rows import RankRows
from fusco.integrations.group_communicators import GroupCommunicators

SIZE_HINT = 1  # bytes: callers make a new buffer if one wants more than theirs has. Memory is of the calls' own sizes
Event = EventOverlap | EventHandle | None
Rows = torch.Tensor | tuple[torch.Tensor, ...]
_Sent = TypeVar("_Sent", bound=SentHandle)


class BufferBase:
    """The communicators of a group, and calls along handles of dispatches on them."""

    _refused: ClassVar[tuple[str, ...]] = ()  # beginnings of names
    _offered: ClassVar[str]  # what the class has

    def __init__(
        self, group: dist.ProcessGroup, ranks_per_node: int | None = None, settings: Settings | None = None
    ) -> None:
        """Nothing is allocated before the first call. The group may be of any backend."""
        self.group = group
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._comms = GroupCommunicators(group, ranks_per_node=ranks_per_node, settings=settings)
        self._by_rank = RankRows(group, self._comms)

    def destroy(self) -> None:
        """Release all resources without waiting for other ranks; the buffer cannot be used afterwards."""
        self._comms.abort()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Return the current stream, on which everything runs."""
        return torch.cuda.current_stream()

    def __getattr__(self, name: str) -> Any:
        if name.startswith(self._refused):
            self._refuse(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def _refuse(cls, what: str) -> NoReturn:
        raise NotImplementedError(f"fusco's {cls.__name__} has {cls._offered} only, not {what}")

    @contextmanager
    def _along(
        self, find: Callable[[], _Sent], *previous_events: Event, comms: GroupCommunicators | None = None
    ) -> Iterator[_Sent]:
        """Yield the routing that ``find`` finds in a caller's handle; a block's errors are those of a call along it.

        ``comms`` are those of a call that are not the buffer's.
        """
        with (comms or self._comms).rejecting():
            sent = find()
        with sent.rejecting():
            wait_for(*previous_events)
            yield sent

    def _dispatch_again(
        self,
        find: Callable[[], _Sent],
        x: Rows,
        weights: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
        *,
        num_sms: int | None = None,
        previous_events: Sequence[Event] = (),
        check: Callable[[_Sent], None] = lambda _: None,
    ) -> tuple[_Sent, tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Send other tokens, and weights by k or by expert, along a handle; return what they are along, and arrived.

        ``check`` raises for a call that the routing is not for.
        """
        with self._along(find, *previous_events) as sent:
            check(sent)
            payloads, of_tokens = payloads_of(x), sent.weights_of_tokens(*weights)
            launch = Launch(num_sms=num_sms)
        return sent, *sent.dispatch_again(payloads, of_tokens, launch)

    def _combine(
        self,
        find: Callable[[], _Sent],
        x: torch.Tensor,
        values: torch.Tensor | None,
        *,
        num_sms: int | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        previous_events: Sequence[Event] = (),
        prepare: Callable[[_Sent, torch.Tensor], torch.Tensor] = lambda _, values: values,
    ) -> tuple[_Sent, torch.Tensor, torch.Tensor | None]:
        """Add up the rows of each token, and values of rows for each token and k; return what they are along, and both.

        ``prepare`` makes of a caller's values those that ``SentHandle.rows_of_values`` takes. All ranks have a ``bias``
        or none has.
        """
        of_tokens: Sequence[torch.Tensor]
        with self._along(find, *previous_events) as sent:
            biases, launch = biases_of(bias, sent.handle.num_tokens, *x.shape[1:]), Launch(num_sms=num_sms)
            of_values = [] if values is None else [sent.rows_of_values(prepare(sent, values))]
            # Sums and biases are rounded once, so sums of 16-bit rows are float32. Each half of the columns of such
            # rows is as wide as the rows that were sent.
            is_widened = bool(biases) and x.dtype.itemsize == 2
            halves = x.float().tensor_split(2, 1) if is_widened and x.shape[1] > 1 else (x,)
            parts = [each.contiguous() for each in halves]
        if is_widened:
            sums = torch.cat([sent.combine([each], launch)[0] for each in parts], 1)
            of_tokens = sent.combine(of_values, launch) if of_values else ()
        else:
            sums, *of_tokens = sent.combine([*parts, *of_values], launch)
        if biases:
            sums = (sums + sum(each.to(sums.dtype) for each in biases)).to(x.dtype)
        return sent, sums, of_tokens[0] if of_tokens else None


def payloads_of(x: Rows) -> list[torch.Tensor]:
    """Return rows, or rows and their scales of any strides, as they are sent."""
    return [each.contiguous() for each in (x if isinstance(x, tuple) else (x,))]


def like(x: Rows, rows: tuple[torch.Tensor, ...]) -> Rows:
    """Return rows that arrived in the form of those that were sent: alone, or with their scales."""
    return rows if isinstance(x, tuple) else rows[0]
