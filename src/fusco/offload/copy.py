"""Handle of a copy."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Protocol

from fusco.core.errors import LaunchError, TransportError
from fusco.core.threads import limit_now
from fusco.offload.driver import CudaDriver
from fusco.offload.mover import DONE, FAILED, ISSUED, QUEUED, TO_HOST, Job
from fusco.offload.shared_links import SharedLinks

_LOOK_S = 0.00002  # between looks at an event


class CopyingGpu(Protocol):
    """What copies need of their copier; its attributes and methods are described there."""

    name: str
    timeout_s: float
    driver: CudaDriver

    def current_stream(self) -> int: ...
    def in_context(self) -> AbstractContextManager[None]: ...
    def reap(self) -> None: ...


class Copy:
    """A copy under way. Both tensors are kept, and must not be written, until it is done.

    Attributes:
        num_bytes: its bytes.
        reason: why it takes the GPU's own PCIe link only, as one ``cudaMemcpyAsync``; empty if it may take several.
    """

    num_bytes: int
    reason: str

    def wait(self, timeout_s: float | None = None) -> None:
        """Have the current stream wait until the copy is done.

        The host waits until all of it has been given to the GPU: almost immediate for a ``cudaMemcpyAsync``, and
        otherwise until a few chunks are left. Raises as ``synchronize``.
        """
        raise NotImplementedError

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait on the host until the copy is done.

        Raises:
            TransportError: if it is not done within the limit, by default that of the copier; names what is missing.
            LaunchError: if CUDA has failed.
        """
        raise NotImplementedError

    @property
    def is_done(self) -> bool:
        """True if the copy is done; raises ``LaunchError`` if CUDA has failed."""
        raise NotImplementedError

    @property
    def borrowed_bytes(self) -> int:
        """Bytes that have taken the links of other GPUs so far."""
        return 0


class PlainCopy(Copy):
    """One ``cudaMemcpyAsync`` on the caller's stream, and an event behind it."""

    def __init__(self, copier: CopyingGpu, stream: int, event: int, num_bytes: int, reason: str) -> None:
        self._copier, self._stream, self._event = copier, stream, event
        self.num_bytes, self.reason = num_bytes, reason
        self._was_done = False

    def wait(self, timeout_s: float | None = None) -> None:  # noqa: ARG002  it never waits
        if not self._was_done and (stream := self._copier.current_stream()) != self._stream:
            with self._copier.in_context():
                self._copier.driver.wait(stream, self._event)

    def synchronize(self, timeout_s: float | None = None) -> None:
        limit_s = limit_now(self._copier.timeout_s if timeout_s is None else timeout_s)
        end = time.monotonic() + limit_s
        while not self.is_done:
            if time.monotonic() > end:
                raise TransportError(
                    f"{self._copier.name}: a copy of {self.num_bytes:,} bytes is not done after {limit_s:g} s; it "
                    f"waits for its stream or for the PCIe link"
                )
            time.sleep(_LOOK_S)
        self._copier.reap()

    @property
    def is_done(self) -> bool:
        self._was_done = self._was_done or self._copier.driver.is_complete(self._event)
        return self._was_done


class ChunkedCopy(Copy):
    """A job of the mover."""

    def __init__(self, copier: CopyingGpu, links: SharedLinks, job: Job) -> None:
        self._copier, self._mover, self._job, self._rail_names = copier, links.mover, job, links.rail_names
        self.num_bytes, self.reason = job.num_bytes, links.reason
        self._was_done = False

    def wait(self, timeout_s: float | None = None) -> None:
        if self._was_done:
            return
        if self._reach(ISSUED, timeout_s) == DONE:
            self._was_done = True
            return
        with self._copier.in_context():
            error = self._mover.order(self._job, self._copier.current_stream())
        if error:
            raise LaunchError(f"{self._copier.name}: cuStreamWaitEvent failed: {self._copier.driver.error_name(error)}")

    def synchronize(self, timeout_s: float | None = None) -> None:
        if not self._was_done:
            self._reach(DONE, timeout_s)
            self._was_done = True
        self._copier.reap()

    @property
    def is_done(self) -> bool:
        if not self._was_done:
            state = self._mover.wait(self._job, DONE)
            self._check(state)
            self._was_done = state == DONE
        return self._was_done

    @property
    def borrowed_bytes(self) -> int:
        return int(self._job.num_borrowed)

    def _reach(self, state: int, timeout_s: float | None) -> int:
        limit_s = limit_now(self._copier.timeout_s if timeout_s is None else timeout_s)
        reached = self._mover.wait(self._job, state, limit_s)
        self._check(reached)
        if reached < state:
            stall = self._stall(reached)
            raise TransportError(f"{self._describe()} is not done after {limit_s:g} s; it waits for {stall}")
        return reached

    def _check(self, state: int) -> None:
        if state == FAILED:
            raise LaunchError(f"{self._describe()} failed: {self._copier.driver.error_name(self._job.error)}")

    def _describe(self) -> str:
        where = "to host memory" if self._job.direction == TO_HOST else "from host memory"
        return f"{self._copier.name}: a copy of {self.num_bytes:,} bytes {where}"

    def _stall(self, state: int) -> str:
        if state == QUEUED:
            return "earlier work of its stream"
        rails = ", ".join(self._rail_names[rail] for rail, count in enumerate(self._job.outstanding) if count)
        done = f"{self._job.num_done:,} bytes are done"
        return f"chunks on {rails}; {done}" if rails else f"a free PCIe link; {done}"
