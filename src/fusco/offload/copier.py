"""Copier of one GPU, to and from pinned host memory over its PCIe link and those of idle GPUs; ``copy_to_host``."""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import AbstractContextManager
from functools import cache

import torch

from fusco.core.announcements import announce
from fusco.core.errors import ClosedError, FuscoError, LaunchError
from fusco.core.threads import leak
from fusco.offload.copy import ChunkedCopy, Copy, PlainCopy
from fusco.offload.driver import CudaDriver
from fusco.offload.mover import FROM_HOST, TO_HOST, Job
from fusco.offload.relay import Relay, Resources
from fusco.offload.settings import Machine, OffloadSettings, this_machine
from fusco.offload.shared_links import SharedLinks

_LOCK = threading.Lock()  # so that threads make a GPU's copier once


class Copier(AbstractContextManager["Copier"]):
    """Copies between one GPU and pinned host memory. ``close`` it, or use it in ``with``; else it closes at exit.

    Attributes:
        device: the GPU, as CUDA numbers it in this process.
        settings: its settings.
        driver: the CUDA driver.
        name: the copier, for errors.
        timeout_s: the limit of a wait.
        links: what is shared with other processes; ``None`` if no other link can ever be used.
    """

    def __init__(self, device: int, settings: OffloadSettings | None = None, machine: Machine | None = None) -> None:
        """Register on the board of the host and take memory on relays, which opens a CUDA context on each.

        Where that is not possible, ``reason`` says why in one line, and copies are plain ``cudaMemcpyAsync``.

        Args:
            device: the GPU, as CUDA numbers it in this process.
            settings: bounds, budget and relays.
            machine: what it runs on; by default, this machine.

        Raises:
            OSError: if there is no CUDA driver.
            LaunchError: if CUDA fails on this GPU.
            ValueError: for relays that cannot be.
        """
        self.device, self.settings = device, settings or OffloadSettings()
        self.name, self.timeout_s = f"GPU {device}", self.settings.timeout_s
        self._machine = machine or this_machine()
        self.driver: CudaDriver = self._machine.driver
        self._resources = Resources(self.driver)
        self._context = self._resources.context(device)
        self._events: list[int] = []  # free ones
        self._under_way: dict[Copy, tuple[int, object]] = {}  # with their event and what they keep
        self._lock, self._is_closed, self._pid = threading.Lock(), False, os.getpid()
        try:
            self.links, self._reason = self._open_links()
        except BaseException:
            self._resources.close()
            raise
        self._too_small = f"copies of less than min_bytes, {self.settings.min_bytes:,}, are not worth it"
        atexit.register(self.close)

    def copy(self, direction: int, device: int, host: int, num_bytes: int, keeps: object = None) -> Copy:
        """Copy between two addresses, after all work of the current stream so far.

        Args:
            direction: 0 to host memory, 1 from it.
            device: address in this GPU's memory.
            host: address in pinned host memory.
            num_bytes: bytes.
            keeps: kept until the copy is done.

        Raises:
            ClosedError: if the copier was closed, or belongs to the process that this one was forked from.
            LaunchError: if CUDA fails.
        """
        self._require_open()
        stream, links = self.current_stream(), self.links
        with self._lock, self.driver.current(self._context):
            self._require_open()  # another thread may have closed it meanwhile
            self._reap()
            event = self._events.pop() if self._events else self._resources.events(self._context, 1)[0]
            copy: Copy
            try:
                if links is None or num_bytes < self.settings.min_bytes:
                    if links is not None:
                        links.announce(direction)
                    self.driver.copy(direction, device, host, num_bytes, stream)
                    self.driver.record(event, stream)
                    copy = PlainCopy(self, stream, event, num_bytes, self._reason or self._too_small)
                else:
                    self.driver.record(event, stream)
                    job = Job(host=host, device=device, num_bytes=num_bytes, start=event, direction=direction)
                    links.mover.submit(job)
                    copy = ChunkedCopy(self, links, job)
            except BaseException:
                self._events.append(event)  # nothing waits for it
                raise
            self._under_way[copy] = (event, keeps)
        return copy

    @property
    def reason(self) -> str:
        """Reason why copies take the GPU's own link only, now; empty if they may take others."""
        return self._reason if self.links is None else self.links.reason

    @property
    def relays(self) -> tuple[Relay, ...]:
        """The GPUs whose links may be taken; ``Relay.reason`` says why one is not used."""
        return () if self.links is None else tuple(self.links.relays)

    def current_stream(self) -> int:
        """Return the handle of the caller's current stream on this GPU."""
        return self._machine.current_stream(self.device)

    def in_context(self) -> AbstractContextManager[None]:
        """Make the GPU's context current for a while: the default stream is that of the current one."""
        return self.driver.current(self._context)

    def reap(self) -> None:
        """Let go of what finished copies keep. Every new copy does it, too."""
        with self._lock, self.driver.current(self._context):
            self._reap()

    def close(self) -> None:
        """Wait for copies, give all memory back and leave the board. May be called again."""
        if os.getpid() != self._pid:
            return
        with self._lock:  # no copy begins afterwards
            if self._is_closed:
                return
            self._is_closed = True
        atexit.unregister(self.close)
        try:
            for copy in list(self._under_way):
                copy.synchronize()
        except FuscoError:
            leak(dict(self._under_way))  # the GPU may still read and write the memory of copies that have not ended
            raise
        finally:
            if self.links is not None:
                self.links.close()
            self._under_way.clear()
            self._resources.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._is_closed or os.getpid() != self._pid:
            raise ClosedError(f"{self.name}: the copier was closed, or belongs to another process")

    def _reap(self) -> None:
        """Let go of what copies keep, the oldest first; one that has failed raises from its own waits only."""
        while self._under_way:
            oldest = next(iter(self._under_way))
            try:
                if not oldest.is_done:
                    return
                self._events.append(self._under_way[oldest][0])
            except LaunchError:
                pass  # its event may never complete, so no other copy gets it
            del self._under_way[oldest]

    def _open_links(self) -> tuple[SharedLinks | None, str]:
        """Return what links need, or why only the GPU's own can be used, which is said once."""
        try:
            return SharedLinks(self._machine, self.device, self._context, self.settings), ""
        except (OSError, FuscoError) as error:
            reason = " ".join(str(error).split())  # one line, also of what a compiler says
        announce(f"{self.name}: copies to and from host memory take its own PCIe link only: {reason}")
        return None, reason


def copy_to_host(tensor: torch.Tensor, pinned: torch.Tensor, *, copier: Copier | None = None) -> Copy:
    """Copy a CUDA tensor to pinned host memory, also over the PCIe links of idle GPUs of this host.

    The copy begins after all work of the current stream so far; later work does not wait for it unless ``Copy.wait`` is
    called. Both tensors are kept until it is done, and must not be written before.

    Args:
        tensor: a contiguous CUDA tensor.
        pinned: a contiguous tensor in pinned memory, of the same dtype and shape.
        copier: a copier of the tensor's GPU; by default one for each GPU, made at the first copy.

    Returns:
        The copy, which is under way.

    Raises:
        TypeError, ValueError: for tensors that are neither, or differ, with both values.
        RuntimeError: while the stream is captured into a CUDA graph.
        LaunchError: if CUDA fails.
    """
    return _copy(TO_HOST, tensor, pinned, copier)


def copy_from_host(tensor: torch.Tensor, pinned: torch.Tensor, *, copier: Copier | None = None) -> Copy:
    """Copy pinned host memory to a CUDA tensor; otherwise as ``copy_to_host``.

    The tensor's memory must be free to be written in the order of the current stream, as it is after ``torch.empty``.
    """
    return _copy(FROM_HOST, tensor, pinned, copier)


def copier_of(device: torch.device | int) -> Copier:
    """Return the copier that ``copy_to_host`` and ``copy_from_host`` use for a GPU by default; made when first used.

    Raises as ``Copier``.
    """
    index = device if isinstance(device, int) else device.index
    with _LOCK:
        return _copier(torch.cuda.current_device() if index is None else index)


@cache
def _copier(device: int) -> Copier:
    return Copier(device)


def _copy(direction: int, tensor: torch.Tensor, pinned: torch.Tensor, copier: Copier | None) -> Copy:
    check_tensors(tensor, pinned, copier)
    with torch.cuda.device(tensor.device):  # the copy is ordered by the current stream of this GPU
        is_capturing = torch.cuda.is_current_stream_capturing()
    if is_capturing:
        raise RuntimeError(
            "copies over several PCIe links cannot be captured into a CUDA graph; copy before or after it"
        )
    num_bytes = tensor.numel() * tensor.element_size()
    copier = copier or copier_of(tensor.device)
    return copier.copy(direction, tensor.data_ptr(), pinned.data_ptr(), num_bytes, keeps=(tensor, pinned))


def check_tensors(tensor: torch.Tensor, pinned: torch.Tensor, copier: Copier | None = None) -> None:
    """Check the two tensors of a copy; raises ``TypeError`` or ``ValueError`` with the values."""
    for name, value in (("tensor", tensor), ("pinned", pinned)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if tensor.device.type != "cuda":
        raise ValueError(f"tensor must be on a CUDA device, got {tensor.device}")
    if copier is not None and tensor.device.index != copier.device:
        raise ValueError(f"tensor is on {tensor.device}, but the copier is that of cuda:{copier.device}")
    if pinned.device.type != "cpu":
        raise ValueError(f"pinned must be a CPU tensor in pinned memory, got one on {pinned.device}")
    if not pinned.is_pinned():
        raise ValueError(
            f"pinned must be in pinned memory; make it with pin_memory=True, got {tuple(pinned.shape)} pageable"
        )
    _check_same(tensor, pinned)


def _check_same(tensor: torch.Tensor, pinned: torch.Tensor) -> None:
    for what in ("dtype", "shape"):
        values = [getattr(each, what) for each in (tensor, pinned)]
        if values[0] != values[1]:
            raise ValueError(f"tensor and pinned must have one {what}, got {values[0]} and {values[1]}")
    for name, value in (("tensor", tensor), ("pinned", pinned)):
        if not value.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got shape {tuple(value.shape)} and strides {value.stride()}")
