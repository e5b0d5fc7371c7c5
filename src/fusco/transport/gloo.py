"""Point-to-point messages over gloo that a caller can poll.

Gloo moves bytes in a thread of its own, but its work objects can only be waited for, and a wait that times out closes
every connection of the group. So for each peer one thread waits for sends and one for receives, in the order of
posting, and the caller looks at tickets.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store


class Ticket:
    """A message under way. One that fails is never done; the transport says why."""

    def __init__(self) -> None:
        self.is_done = False


class GlooTransport:
    """Messages among the ranks of one gloo group of its own."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        """Connect all ranks; ``store`` must not have served another transport."""
        # Errors of ours come first; gloo's limit only ends threads that would otherwise wait on.
        # The type stub knows only the constructor.
        self._group: Any = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout_s))
        self._queues: dict[tuple[str, int], _Waits] = {}
        self.failure = ""  # why the first message failed, if one did

    def send(self, message: torch.Tensor, dst: int, tag: int = 0) -> Ticket:
        """Start to send a contiguous, not empty CPU tensor, which must not change until the ticket is done.

        Args:
            message: what to send.
            dst: rank in the group.
            tag: messages of different tags do not wait for each other.

        """
        return self._start("send", self._group.send, message, dst, tag, None)

    def receive(
        self, message: torch.Tensor, src: int, tag: int = 0, on_done: Callable[[], None] | None = None
    ) -> Ticket:
        """Start to receive into a contiguous, not empty CPU tensor of the very size that ``src`` sends.

        Args:
            message: where to receive.
            src: rank in the group.
            tag: as the sender's.
            on_done: called in the waiting thread as soon as the message is there.

        """
        return self._start("receive", self._group.recv, message, src, tag, on_done)

    def close(self) -> None:
        """End the threads, and with them the last users of the connections."""
        for waits in self._queues.values():
            waits.put(None)

    def _start(
        self,
        direction: str,
        post: Callable[[list[torch.Tensor], int, int], dist.Work],
        message: torch.Tensor,
        peer: int,
        tag: int,
        on_done: Callable[[], None] | None,
    ) -> Ticket:
        ticket = Ticket()
        try:
            work = post([message], peer, tag)
        except RuntimeError as error:
            self._note_failure(direction, peer, error)
            return ticket

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                self._note_failure(direction, peer, error)
                return
            if on_done:
                on_done()
            ticket.is_done = True

        self._queue_of(direction, peer).put(wait)
        return ticket

    def _note_failure(self, direction: str, peer: int, error: RuntimeError) -> None:
        if not self.failure:
            self.failure = f"the network failed to {direction} (rank {peer}): {str(error).splitlines()[0]}"

    def _queue_of(self, direction: str, peer: int) -> _Waits:
        if (direction, peer) not in self._queues:
            waits: _Waits = queue.SimpleQueue()
            name = f"fusco-{direction}-{peer}"
            threading.Thread(target=_wait_in_order, args=(waits,), name=name, daemon=True).start()
            self._queues[direction, peer] = waits
        return self._queues[direction, peer]


_Waits: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"


def _wait_in_order(waits: _Waits) -> None:
    while wait := waits.get():
        wait()
