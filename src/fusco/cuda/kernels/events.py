"""Calls of the driver that record events and wait for them on streams, for compiled code."""

from __future__ import annotations

from functools import partial

from fusco.core.errors import LaunchError
from fusco.cuda.kernels.abi import Number
from fusco.cuda.kernels.library import Library
from fusco.cuda.kernels.program import NativeCall


def record_event(library: Library, stream: int, event: Number) -> NativeCall:
    """Return the call that records an event on a stream; both are handles."""
    return NativeCall(library.address_of("cuEventRecord"), (event, stream), partial(_fail, "recorded"))


def wait_for_event(library: Library, stream: int, event: Number) -> NativeCall:
    """Return the call that lets a stream wait for an event; both are handles."""
    return NativeCall(library.address_of("cuStreamWaitEvent"), (stream, event, 0), partial(_fail, "waited for"))


def _fail(done: str, result: int) -> None:
    raise LaunchError(f"an event could not be {done}: error {result} of the CUDA driver")
