"""Ring buffer for slices sent between nodes. A slot is free again once the network has sent it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusco.core.timeline import NoTimeline, Timeline
from fusco.cuda.between_nodes.nccl import Message
from fusco.cuda.between_nodes.network import Network
from fusco.cuda.memory.arena import Arena


class SliceRing:
    """Ring buffer in a rank's arena, which each call uses from the first slot on, with slices numbered from 0.

    Ranks of the node push rows into it that this rank carries for them.

    A call's stream waits for its last slice, and the next call comes after it on every stream. So nothing that an
    earlier call recorded is waited for, as a graph capture could not.
    """

    def __init__(self, network: Network, arena: Arena) -> None:
        self._network, self._arena = network, arena
        self._is_produced = network.gpu.new_event()
        self._is_free: list[torch.cuda.Event | None] = [None] * arena.layout.ring_depth

    def slot(self, number: int, stream: torch.cuda.Stream, dtype: torch.dtype) -> torch.Tensor:
        """Return the slot of a slice, as a row of ``dtype``; the stream waits until it is free."""
        place = number % len(self._is_free)
        if number >= len(self._is_free) and (is_free := self._is_free[place]):
            stream.wait_event(is_free)
        return self._arena.network_slots(dtype)[place]

    def exchange(
        self,
        number: int,
        sends: Sequence[Message],
        receives: Sequence[Message],
        what: str,
        streams: tuple[torch.cuda.Stream, torch.cuda.Stream],
        timeline: Timeline | NoTimeline,
    ) -> torch.cuda.Event:
        """Send a slice after all work on its producer's stream, and receive; return the event of their completion.

        ``streams``: the producer's, and that of the messages; they may be the same.
        """
        producer, stream = streams
        if stream is not producer:
            self._is_produced.record(producer)  # made once: wait_stream would make an event for each slice
            stream.wait_event(self._is_produced)
        with timeline.span("network", what, stream):
            done = self._network.exchange(sends, receives, what, stream)
        self._is_free[number % len(self._is_free)] = done
        return done
