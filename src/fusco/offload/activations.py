"""Activations that autograd saves for backward, kept in pinned host memory between forward and backward."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from fusco.core.integers import check_integer
from fusco.offload.copier import copy_from_host, copy_to_host
from fusco.offload.copy import Copy

_MB = 1 << 20


class TensorMover:
    """Moves flat CUDA tensors to host memory and back. PyTorch keeps freed pinned memory for the next step."""

    def is_movable(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is where activations are moved from."""
        return tensor.is_cuda

    def to_host(self, flat: torch.Tensor) -> tuple[torch.Tensor, Copy]:
        """Begin to copy a tensor; return where to, and the copy."""
        pinned = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        with torch.cuda.device(flat.device):
            return pinned, copy_to_host(flat, pinned)

    def from_host(self, pinned: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Copy]:
        """Begin to copy a tensor back; return where to, and the copy."""
        flat = torch.empty(pinned.shape, dtype=pinned.dtype, device=device)
        with torch.cuda.device(device):
            return flat, copy_from_host(flat, pinned)


class offload_activations(torch.autograd.graph.saved_tensors_hooks):  # noqa: N801  a context manager, as torch's are
    """Keep what autograd saves for backward in pinned host memory, copied over all idle PCIe links of the host.

    Use it around a forward pass; backward may run inside or outside. A tensor leaves the GPU while forward goes on, and
    the next ones return while backward computes. Results are bit-identical. Tensors that stay where they are: those
    not on a GPU, parameters, small ones, subclasses such as ``DTensor``, and ones whose memory has gaps or has other
    values than they (conjugated or negated views).

        with fusco.offload.offload_activations():
            loss = model(batch).loss
        loss.backward()
    """

    def __init__(
        self,
        *,
        min_bytes: int = _MB,
        max_pending_bytes: int = 1024 * _MB,
        prefetch_bytes: int = 512 * _MB,
        keeps: Callable[[torch.Tensor], bool] | None = None,
        mover: TensorMover | None = None,
    ) -> None:
        """Make the context.

        Args:
            min_bytes: tensors of less stay on the GPU.
            max_pending_bytes: bytes that may wait to leave the GPU; with more, forward waits on the host.
            prefetch_bytes: bytes that return ahead of the tensor that backward needs.
            keeps: tensors for which it returns true stay on the GPU.
            mover: moves tensors; by default ``copy_to_host`` and ``copy_from_host``.
        """
        for name, value in (("max_pending_bytes", max_pending_bytes), ("prefetch_bytes", prefetch_bytes)):
            check_integer(name, value, least=0)
        check_integer("min_bytes", min_bytes, least=1)
        self._min_bytes, self._max_pending, self._prefetch = min_bytes, max_pending_bytes, prefetch_bytes
        self._keeps, self._mover = keeps or is_parameter, mover or TensorMover()
        self._lock = threading.RLock()  # backward runs in a thread of each GPU
        self._leaving: deque[_Offloaded] = deque()
        self._by_place: dict[tuple[Any, ...], _Offloaded] = {}  # those leaving, since one tensor may be saved twice
        self._in_order: list[weakref.ref[_Offloaded]] = []
        self.num_bytes = 0
        super().__init__(self._pack, self._unpack)

    num_bytes: int
    """Bytes that have left the GPU so far."""

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Offloaded:
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes < self._min_bytes or not self._mover.is_movable(tensor) or not is_dense(tensor):
            return tensor
        if is_parameter(tensor) or self._keeps(tensor):
            return tensor
        with self._lock:
            self._let_go(self._max_pending - num_bytes)
            place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)  # noqa: SLF001
            if (same := self._by_place.get(place)) is not None:
                return same
            while self._in_order and self._in_order[-1]() is None:  # backward has used them
                self._in_order.pop()
            offloaded = _Offloaded(tensor, self._mover, place, len(self._in_order))
            self._by_place[place] = offloaded
            self._leaving.append(offloaded)
            self._in_order.append(weakref.ref(offloaded))
            self.num_bytes += num_bytes
            return offloaded

    def _unpack(self, packed: torch.Tensor | _Offloaded) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        with self._lock:
            self._let_go(self._max_pending)
            packed.fetch()
            ahead = 0
            for reference in reversed(self._in_order[: packed.index]):
                if ahead >= self._prefetch:
                    break
                if (earlier := reference()) is not None:
                    earlier.fetch()
                    ahead += earlier.num_bytes
            return packed.take()

    def _let_go(self, max_bytes: int) -> None:
        """Let go of tensors that have left, and wait for the oldest while more than ``max_bytes`` have not."""
        pending = sum(each.num_bytes for each in self._leaving)
        while self._leaving and (self._leaving[0].has_left or pending > max_bytes):
            oldest = self._leaving.popleft()
            pending -= oldest.num_bytes
            del self._by_place[oldest.place]
            oldest.let_go()


class _Offloaded:
    """A saved tensor on its way to host memory, there, or on its way back."""

    def __init__(self, tensor: torch.Tensor, mover: TensorMover, place: tuple[Any, ...], index: int) -> None:
        self.num_bytes, self.place, self.index = tensor.numel() * tensor.element_size(), place, index
        self._mover, self._device = mover, tensor.device
        self._shape, self._stride, self._version = tensor.shape, tensor.stride(), tensor._version  # noqa: SLF001
        self._tensor: torch.Tensor | None = tensor
        self._was_written = False
        self._pinned, self._leaving = mover.to_host(tensor.detach().as_strided((tensor.numel(),), (1,)))
        self._returning: tuple[torch.Tensor, Copy] | None = None
        self._returned: tuple[weakref.ref[torch.Tensor], Copy] | None = None

    @property
    def has_left(self) -> bool:
        return self._leaving.is_done

    def let_go(self) -> None:
        """Free the tensor on the GPU, after a wait until it has been copied."""
        self._leaving.synchronize()
        self._check()
        self._tensor = None

    def fetch(self) -> None:
        """Begin to copy it back, unless it is on the GPU."""
        if self._tensor is None and self._returning is None and (self._returned is None or self._returned[0]() is None):
            self._returning = self._mover.from_host(self._pinned, self._device)

    def take(self) -> torch.Tensor:
        """Return the tensor; the current stream waits for it."""
        self._check()
        if self._was_written:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._shape)} that autograd saved was written in place before it had left "
                f"the GPU; keep it there (keeps=...), or do not write to it"
            )
        if self._tensor is not None:
            return self._tensor
        if self._returning is not None:
            flat, copy = self._returning
            tensor, self._returning = flat.as_strided(self._shape, self._stride), None
            self._returned = (weakref.ref(tensor), copy)
            return ready(tensor, copy)
        returned = self._returned[0]() if self._returned is not None else None
        if returned is None:
            self.fetch()
            return self.take()
        assert self._returned is not None
        return ready(returned, self._returned[1])

    def _check(self) -> None:
        if self._tensor is not None and self._tensor._version != self._version:  # noqa: SLF001
            self._was_written = True


def ready(tensor: torch.Tensor, copy: Copy) -> torch.Tensor:
    """Return a tensor that is being copied, for use on the current stream; it may have been allocated on another."""
    copy.wait()
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def is_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter or a view of one, which stays on the GPU anyway."""
    base = tensor._base if tensor._base is not None else tensor  # noqa: SLF001  torch has no public name for it
    return isinstance(base, torch.nn.Parameter) or (base.is_leaf and base.requires_grad)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill a piece of memory without gaps or overlaps, in any order, as they are.

    >>> is_dense(torch.empty(2, 3).t()), is_dense(torch.empty(2, 3)[:, :2]), is_dense(torch.empty(1, 3).expand(2, 3))
    (True, False, False)
    """
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
