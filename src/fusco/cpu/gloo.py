"""Point-to-point messages over gloo that a caller can poll.

gloo moves bytes in a separate thread. Its work objects can only be waited for, not polled, and a wait that times out
closes every connection of the group. So two threads per peer wait, one for sends and one for receives, in the order of
posting, and the caller polls tickets. Only ``close`` lets a wait time out, which ends all others.
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

# Connecting may take this part of the timeout: less than it takes to give up on ranks, so that gloo reports the error.
_CONNECT_FRACTION = 0.6
# For ``close``: timeout for threads to end, which they do at once; and a tag that no message has.
_JOIN_TIMEOUT_S = 1.0
_UNUSED_TAG = 1 << 30


class Ticket:
    """Message in flight. One that fails is never done; ``GlooTransport.failure`` has the reason."""

    def __init__(self) -> None:
        self.is_done = False


class GlooTransport:
    """Messages between the ranks of a private gloo group."""

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
            store: store for the addresses of ranks; no other transport may have used it.
            rank: this rank.
            world_size: number of ranks.
            timeout_s: timeout of gloo for a message. The watchdog's errors come first; this one only ends threads.
            listen_on: address at which other ranks reach this one. gloo listens on it, unless ``GLOO_SOCKET_IFNAME``
                names an interface, as for other gloo groups; of several it takes the first.
            wait_until: waits for a condition, and raises if a rank fails meanwhile.

        Raises:
            RuntimeError: gloo cannot connect the ranks.

        """
        self._timeout = timedelta(seconds=timeout_s)
        # If a rank dies while others connect to it, gloo takes several times its timeout.
        connecting = in_thread(
            lambda: dist.ProcessGroupGloo(
                store, rank, world_size, _options(_CONNECT_FRACTION * self._timeout, listen_on)
            )
        )
        wait_until(connecting.done)
        self._group = connecting.result()
        self._waiters: dict[tuple[str, int], _Waiter] = {}
        self._in_flight: set[Ticket] = set()
        self.failure = ""  # the reason why the first message failed, or empty

    def send(self, message: torch.Tensor, dst: int, tag: int = 0) -> Ticket:
        """Start to send a contiguous, non-empty CPU tensor, which must not change until the ticket is done.

        Args:
            message: tensor to send.
            dst: rank in the group.
            tag: messages of different tags do not wait for each other.

        """
        return self._start("send", self._group.send, message, dst, tag, None)

    def receive(
        self, message: torch.Tensor, src: int, tag: int = 0, on_done: Callable[[], None] | None = None
    ) -> Ticket:
        """Start to receive into a contiguous, non-empty CPU tensor of exactly the size that ``src`` sends.

        Args:
            message: tensor to receive into.
            src: rank in the group.
            tag: the sender's tag.
            on_done: called in the waiting thread as soon as the message has arrived.

        """
        return self._start("receive", self._group.recv, message, src, tag, on_done)

    def close(self) -> None:
        """End the threads and the connections; messages in flight are dropped."""
        if self._in_flight:
            self._disconnect()
        for waiter in self._waiters.values():
            waiter.end()
        self._waiters, self._group = {}, None

    def _disconnect(self) -> None:
        for peer in {peer for _, peer in self._waiters}:
            try:
                byte = torch.empty(1, dtype=torch.uint8, device="cpu")
                self._group.recv([byte], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError:
                pass  # expected: the connection is closed now, or was before

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
            self._record_failure(direction, peer, error)
            return ticket

        def wait() -> None:
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                self._record_failure(direction, peer, error)
                self._in_flight.discard(ticket)
                return
            if on_done:
                on_done()
            self._in_flight.discard(ticket)
            ticket.is_done = True

        self._in_flight.add(ticket)
        waiter.add(wait)
        return ticket

    def _record_failure(self, direction: str, peer: int, error: RuntimeError) -> None:
        if not self.failure:
            self.failure = f"the network failed to {direction} (rank {peer}): {str(error).splitlines()[0]}"

    def _waiter_of(self, direction: str, peer: int) -> _Waiter:
        if (direction, peer) not in self._waiters:
            self._waiters[direction, peer] = _Waiter(f"fusco-{direction}-{peer}")
        return self._waiters[direction, peer]


class NoTransport(GlooTransport):
    """Transport of a rank whose node is the only one: no peers, no connections."""

    def __init__(self) -> None:
        self._waiters, self._in_flight, self._group, self.failure = {}, set(), None, ""


def _options(timeout: timedelta, listen_on: str) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001  the only way to choose the interface
    # A device without either would listen on the address of the host name, which may be a loopback address.
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    where = {"interface": interface} if interface else {"hostname": listen_on}
    device = dist.ProcessGroupGloo.create_device(**where)
    options._devices, options._timeout = [device], timeout  # noqa: SLF001
    return options


class _Waiter:
    """Thread that waits for messages, one after the other."""

    def __init__(self, name: str) -> None:
        self._waits: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait_in_order, name=name, daemon=True)
        self._thread.start()

    def add(self, wait: Callable[[], None]) -> None:
        """Append a wait."""
        self._waits.put(wait)

    def end(self) -> None:
        """End the thread after all waits."""
        self._waits.put(None)
        self._thread.join(_JOIN_TIMEOUT_S)

    def _wait_in_order(self) -> None:
        while wait := self._waits.get():
            wait()
