"""Point-to-point messages over gloo that a caller can poll.

Gloo moves bytes in a thread of its own, but its work objects can only be waited for, and a wait that times out closes
every connection of the group. So for each peer one thread waits for sends and one for receives, in the order of
posting, and the caller looks at tickets. Only in closing is a wait made to time out: that ends all others.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from fusco.control.threads import in_thread

# What connecting may take of the limit: less than it takes to give ranks up, so that gloo can say what is wrong.
_CONNECTING = 0.6
# In closing: how long threads may take to end, which they do at once; and a tag that no message has.
_ENDING_S = 1.0
_NO_MESSAGES_TAG = 1 << 30


class Ticket:
    """A message under way. One that fails is never done; the transport says why."""

    def __init__(self) -> None:
        self.is_done = False


class GlooTransport:
    """Messages among the ranks of one gloo group of its own."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        listen_on: str,
        wait_until: Callable[[Callable[[], bool]], None],
    ) -> None:
        """Connect all ranks.

        Args:
            store: where ranks leave their addresses; it must not have served another transport.
            rank: this rank.
            world_size: number of ranks.
            timeout_s: when gloo gives a message up. Errors of ours come first; this only ends threads.
            listen_on: address at which other ranks reach this one; gloo uses it if it is a loopback address. Otherwise,
                or where ``GLOO_SOCKET_IFNAME`` is set, gloo chooses its interface itself.
            wait_until: waits for a condition, and raises if a rank fails meanwhile.

        Raises:
            RuntimeError: of gloo, if the ranks cannot be connected.

        """
        self._limit = timedelta(seconds=timeout_s)
        # Where a rank dies while others connect to it, gloo takes several times its limit.
        connecting = in_thread(
            lambda: dist.ProcessGroupGloo(store, rank, world_size, _options(_CONNECTING * self._limit, listen_on))
        )
        wait_until(connecting.done)
        self._group = connecting.result()
        self._waiters: dict[tuple[str, int], _Waiter] = {}
        self._under_way: set[Ticket] = set()
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
        """End the threads and the connections, and with them what is still under way."""
        if self._under_way:
            self._hang_up()
        for waiter in self._waiters.values():
            waiter.end()
        self._waiters, self._group = {}, None

    def _hang_up(self) -> None:
        for peer in {peer for _, peer in self._waiters}:
            try:
                byte = torch.empty(1, dtype=torch.uint8, device="cpu")
                self._group.recv([byte], peer, _NO_MESSAGES_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError:
                pass  # as it should: that connection is closed now, or was before

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
        waiter = self._waiter_of(direction, peer)
        try:
            work = post([message], peer, tag)
        except RuntimeError as error:
            self._note_failure(direction, peer, error)
            return ticket

        def wait() -> None:
            try:
                work.wait(self._limit)
            except RuntimeError as error:
                self._note_failure(direction, peer, error)
                self._under_way.discard(ticket)
                return
            if on_done:
                on_done()
            self._under_way.discard(ticket)
            ticket.is_done = True

        self._under_way.add(ticket)
        waiter.add(wait)
        return ticket

    def _note_failure(self, direction: str, peer: int, error: RuntimeError) -> None:
        if not self.failure:
            self.failure = f"the network failed to {direction} (rank {peer}): {str(error).splitlines()[0]}"

    def _waiter_of(self, direction: str, peer: int) -> _Waiter:
        if (direction, peer) not in self._waiters:
            self._waiters[direction, peer] = _Waiter(f"fusco-{direction}-{peer}")
        return self._waiters[direction, peer]


class NoTransport(GlooTransport):
    """What a rank has whose node is the only one: nobody to send to, and nothing opened."""

    def __init__(self) -> None:
        self._waiters, self._under_way, self._group, self.failure = {}, set(), None, ""


def _options(limit: timedelta, listen_on: str) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001  the only way to choose the interface
    is_local = listen_on.startswith("127.") and not os.environ.get("GLOO_SOCKET_IFNAME")
    device = (
        dist.ProcessGroupGloo.create_device(hostname=listen_on)
        if is_local
        else dist.ProcessGroupGloo.create_default_device()
    )
    options._devices, options._timeout = [device], limit  # noqa: SLF001
    return options


class _Waiter:
    """A thread that waits for messages, one after the other."""

    def __init__(self, name: str) -> None:
        self._waits: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait_in_order, name=name, daemon=True)
        self._thread.start()

    def add(self, wait: Callable[[], None]) -> None:
        """Wait for this, too."""
        self._waits.put(wait)

    def end(self) -> None:
        """End the thread once it has waited for everything."""
        self._waits.put(None)
        self._thread.join(_ENDING_S)

    def _wait_in_order(self) -> None:
        while wait := self._waits.get():
            wait()
