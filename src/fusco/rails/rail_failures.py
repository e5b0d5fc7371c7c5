"""Failures of a channel's rails, and the errors that name them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fusco.core.errors import PeerFailureError, Stall
from fusco.rails.rail import Rail
from fusco.rails.request import Request


class RailFailures:
    """Failures of the rails between a worker and its peer; ``connected`` are the rails that are connected now."""

    def __init__(self, worker: int, peer: int, rails: Sequence[Rail], connected: Collection[int]) -> None:
        self._worker, self._peer, self._rails, self._connected = worker, peer, rails, connected
        self._reasons: dict[int, str] = {}

    def note(self, rail: int, reason: str) -> None:
        """Note why a rail failed last, or could not be connected."""
        self._reasons[rail] = reason

    def __str__(self) -> str:
        """Describe each rail: connected, or why it failed."""
        states = []
        for i, rail in enumerate(self._rails):
            state = "connected" if i in self._connected else self._reasons.get(i, "never connected")
            states.append(f"rail {i} ({rail.interface}, {rail.address}): {state}")
        return "; ".join(states)

    def error(self, reason: str, request: Request | None = None, *, has_left: bool = False) -> PeerFailureError:
        """Return the error of a channel, or of a request that waited for too long."""
        what = f"{request.verb} #{request.seq}" if request else "a channel"
        seen = f"{len(self._connected)} of {len(self._rails)} rails connected"
        stall = Stall("transfer over rails", (self._peer,), "the message" if request else "a rail", seen)
        return PeerFailureError(
            rank=self._worker, peers=(self._peer,), operation=what, stall=stall, reason=reason, has_left=has_left
        )
