"""Threads beside the one that computes."""

from __future__ import annotations

import torch

from fusco.core.errors import TransportError


def enter_device(device: torch.device) -> None:
    """Use a device in this thread, and be in nobody's way who captures a graph in another one meanwhile.

    ``torch.cuda.graph`` captures in a mode in which a mere look at an event fails in any other thread, and spoils the
    capture; unless that thread has said that it heeds its own captures only.
    """
    if not torch.cuda.is_available():
        return  # the device is a simulated one
    from cuda.bindings import driver  # noqa: PLC0415  of the extra fusco[cuda]

    torch.cuda.set_device(device)
    own = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    result, _ = driver.cuThreadExchangeStreamCaptureMode(own)
    if int(result):
        raise TransportError(f"a thread for {device} could not leave other threads' captures alone: {result.name}")
