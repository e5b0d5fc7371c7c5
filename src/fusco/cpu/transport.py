"""Interface of the transports between nodes: one TCP connection to each peer, or several NICs as one link."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Ticket:
    """Message in flight. One that fails is never done; ``Transport.failure`` has the reason."""

    def __init__(self) -> None:
        self.is_done = False


class Transport(Protocol):
    """Messages between this rank and all ranks of other nodes, progressed by polling in the calling thread.

    Messages from one rank to another arrive in the order of sending, and must be received in that order.
    """

    @property
    def failure(self) -> str:
        """The first error of the network; empty while it works."""

    def send(self, message: torch.Tensor, dst: int) -> Ticket:
        """Start to send a contiguous CPU tensor, not empty, which must not change until the ticket is done."""

    def receive(self, message: torch.Tensor, src: int, on_done: Callable[[], None] | None = None) -> Ticket:
        """Start to receive into a contiguous CPU tensor, not empty and of exactly the size that ``src`` sends.

        ``on_done`` is called as soon as the message has arrived.
        """

    def poll(self) -> bool:
        """Send and receive without blocking; return whether any bytes moved."""

    def awaited_sockets(self) -> list[int] | None:
        """Return the sockets that messages wait for, see ``Watchdog.add_sockets``."""

    @property
    def unflushed_peers(self) -> tuple[int, ...]:
        """Peers that wait for something that this rank has not sent yet, although all its messages are done."""

    def close(self) -> None:
        """Close the connections; messages in flight are dropped."""
