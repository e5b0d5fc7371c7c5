"""The end of what a rank has launched: awaited with a limit, as anybody's kernels may stand before ours in a stream."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

_BETWEEN_LOOKS_S = 1e-3


class LastWork:
    """What was launched on some streams up to now."""

    def __init__(self, streams: Iterable[torch.cuda.Stream], limit_s: float) -> None:
        """The limit begins here."""
        self._deadline = time.monotonic() + limit_s
        self._events = []
        for stream in streams:
            event = torch.cuda.Event()
            event.record(stream)
            self._events.append(event)

    def ends(self) -> bool:
        """Wait until all of it is done; false if that takes longer than the limit."""
        while not all(event.query() for event in self._events):
            if time.monotonic() > self._deadline:
                return False
            time.sleep(_BETWEEN_LOOKS_S)
        return True
