"""Inputs of calls that have been validated in full, so that later calls with the same shapes and dtypes cost little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from fusco.control.fingerprint import CollectiveFingerprint
from fusco.core.recent import Recent
from fusco.core.rows import bytes_needed, has_memory, why_nothing_moves_here
from fusco.engine.base import KnownCall

# Compares dispatch keys, dtypes, devices, shapes and strides of several tensors in 0.3 us; Python takes ten times as
# long. Part of PyTorch's compiler, and not public: without it ``_key_of`` does the same.
_TENSOR_GUARDS: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)  # noqa: SLF001


@dataclass(eq=False)
class KnownInput(KnownCall):
    """A valid input."""

    # of each tensor, from its first element to the end of its last one: a constant, and as much for each of its rows;
    # then of an element
    num_bytes: tuple[tuple[int, int, int], ...]
    is_grad_enabled: bool  # whether autograd was on, as it is part of the fingerprint
    guard: Any  # compares tensors with these, if there is such a thing; a nested tensor would end the process

    def is_like(self, tensors: Sequence[Any], num_rows: int) -> bool:
        """Return whether tensors are like these, with all their memory; false if that is not quickly found out.

        The guard compares the thread's state, too, such as transforms of torch.func, but for modes that trace.
        """
        if self.guard is None or self.is_grad_enabled is not torch.is_grad_enabled():
            return False
        if torch._C._len_torch_dispatch_stack():  # noqa: SLF001  there is no public query
            return False
        try:
            for tensor, (least, of_row, of_element) in zip(tensors, self.num_bytes):  # noqa: B905  as many; ``strict`` takes 0.1 us
                end = tensor.storage_offset() * of_element + least + of_row * num_rows
                if tensor.is_nested or end > tensor.untyped_storage().nbytes():
                    return False
        except (TypeError, AttributeError, RuntimeError, IndexError):  # no tensor, or one without storage or rows
            return False
        return bool(self.guard.check(*tensors))


class KnownInputs:
    """The valid inputs of one communicator that were seen lately."""

    def __init__(self, *, has_any_rows: bool = False) -> None:
        """With ``has_any_rows``, inputs of any size in the first dimension are the same."""
        self._has_any_rows = has_any_rows
        self._by_key: Recent[tuple[object, ...], KnownInput] = Recent()
        self._latest: Recent[tuple[object, ...], KnownInput] = Recent()  # by options

    def find(
        self, tensors: Sequence[torch.Tensor], options: tuple[object, ...], num_rows: int = 0
    ) -> KnownInput | None:
        """Return what is known of an input; ``None`` if it is new, or if the memory of a tensor has been freed.

        ``None``, too, where nothing can be moved. Anything may be among the ``tensors`` of the input. ``options`` are
        the verb, the number of tensors, and everything else that validation depends on. Inputs of any size have
        ``num_rows``, which the caller compares.
        """
        if forward_ad._current_level >= 0:  # noqa: SLF001  a tangent shows in nothing that is compared
            return None
        try:
            known = self._latest.get(options)
        except TypeError:  # an option that has no hash is of no valid input
            return None
        if known is not None and known.is_like(tensors, num_rows):
            return known
        if why_nothing_moves_here():
            return None
        key = self._key_of(tensors, options)
        known = self._by_key.use(key) if key else None
        if known is None or not all(map(has_memory, tensors)):
            return None
        self._latest[options] = known
        return known

    def add(
        self, fingerprint: CollectiveFingerprint, tensors: Sequence[torch.Tensor], options: tuple[object, ...]
    ) -> None:
        """Add an input that has been validated in full."""
        key = self._key_of(tensors, options)
        if key is None or forward_ad._current_level >= 0:  # noqa: SLF001
            return
        of_tensors = map(_bytes_of_rows, tensors) if self._has_any_rows else ((bytes_needed(t), 0) for t in tensors)
        num_bytes = tuple((*of, t.element_size()) for of, t in zip(of_tensors, tensors, strict=True))
        known = KnownInput(fingerprint, num_bytes, torch.is_grad_enabled(), self._guard_of(tensors))
        self._by_key[key] = self._latest[options] = known

    def _guard_of(self, tensors: Sequence[torch.Tensor]) -> Any:
        if _TENSOR_GUARDS is None:
            return None
        sizes, strides = [[*tensor.shape] for tensor in tensors], [[*tensor.stride()] for tensor in tensors]
        if self._has_any_rows:
            sizes = [[None, *of_rest] for _, *of_rest in sizes]
        return _TENSOR_GUARDS(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)

    def _key_of(self, tensors: Sequence[torch.Tensor], options: tuple[object, ...]) -> tuple[object, ...] | None:
        """Return a key of everything that validation depends on; ``None`` for an input that has none.

        The dispatch keys of a tensor say what kind it is: dense, of a subclass, of a transform, quantised, ...
        """
        key: list[object] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *options]
        try:
            for tensor in tensors:
                kind = torch._C._dispatch_keys(tensor).raw_repr()  # noqa: SLF001  there is no public query
                sizes = tensor.shape[1:] if self._has_any_rows else tensor.shape
                key += type(tensor), kind, tensor.dtype, tensor.device, sizes, tensor.stride(), tensor.requires_grad
            hash(result := tuple(key))
        except (TypeError, RuntimeError, AttributeError):  # no tensor, or one without strides; validation says which
            return None
        return result


def _bytes_of_rows(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes that a tensor needs besides those for each of its rows, and these.

    >>> _bytes_of_rows(torch.zeros(3, 4)), _bytes_of_rows(torch.zeros(3, 4)[:, :2])
    ((0, 16), (-8, 16))
    """
    row = torch.empty_strided((1, *tensor.shape[1:]), tensor.stride(), dtype=tensor.dtype, device="meta")
    of_row = tensor.stride(0) * tensor.element_size()
    return bytes_needed(row) - of_row, of_row
