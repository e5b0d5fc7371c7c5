"""Inputs of calls that have been validated in full, so that later calls with the same shapes and dtypes cost little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from fusco.control.fingerprint import CollectiveFingerprint
from fusco.core.movable import bytes_needed
from fusco.core.recent import Recent

# Compares dispatch keys, dtypes, devices, shapes and strides of several tensors in 0.3 us; Python takes ten times as
# long. Part of PyTorch's compiler, and not public: without it ``_key_of`` does the same.
_TENSOR_GUARDS: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)  # noqa: SLF001


@dataclass(frozen=True)
class KnownInput:
    """A valid input.

    Attributes:
        fingerprint: of a collective with this input.
        num_bytes: of each tensor, from its first element to the end of its last one.
        options: what validation depends on besides the tensors.
        is_grad_enabled: whether autograd was on, as it is part of the fingerprint.
        guard: compares tensors with these, if there is such a thing; a nested tensor would end the process.
    """

    fingerprint: CollectiveFingerprint
    num_bytes: tuple[int, ...]
    options: tuple[object, ...]
    is_grad_enabled: bool
    guard: Any


class KnownInputs:
    """The valid inputs of one communicator that were seen lately."""

    def __init__(self) -> None:
        self._by_key: Recent[tuple[object, ...], KnownInput] = Recent()
        self._latest: dict[object, KnownInput] = {}  # by verb

    def find(self, tensors: Sequence[torch.Tensor], *options: object) -> KnownInput | None:
        """Return what is known of an input; ``None`` if it is new, or if the memory of a tensor has been freed.

        Args:
            tensors: of the input. Anything may be among them.
            options: the verb, the number of tensors, and everything else that validation depends on.
        """
        if forward_ad._current_level >= 0:  # noqa: SLF001  a tangent shows in nothing that is compared
            return None
        known = self._latest.get(options[0])
        if known is not None and known.options == options and known.is_grad_enabled is torch.is_grad_enabled():
            guard = known.guard
            try:
                has_nested = any([tensor.is_nested for tensor in tensors])  # noqa: C419  quicker than a generator
                if guard and not has_nested and guard.check(*tensors):
                    return known if _has_memory(tensors, known.num_bytes) else None
            except AttributeError:  # no tensor
                return None
        key = _key_of(tensors, options)
        known = self._by_key.get(key) if key else None
        if known is None or not _has_memory(tensors, known.num_bytes):
            return None
        self._latest[options[0]] = known
        return known

    def add(self, fingerprint: CollectiveFingerprint, tensors: Sequence[torch.Tensor], *options: object) -> None:
        """Add an input that has been validated in full."""
        key = _key_of(tensors, options)
        if key is None or forward_ad._current_level >= 0:  # noqa: SLF001
            return
        num_bytes = tuple(map(bytes_needed, tensors))
        known = KnownInput(fingerprint, num_bytes, options, torch.is_grad_enabled(), _guard_of(tensors))
        self._by_key[key] = self._latest[options[0]] = known


def _has_memory(tensors: Sequence[torch.Tensor], num_bytes: Sequence[int]) -> bool:
    """Return whether the storage of each tensor has this many bytes from its first element on."""
    for tensor, needed in zip(tensors, num_bytes, strict=True):
        first = tensor.storage_offset() * tensor.element_size()
        if needed and first + needed > tensor.untyped_storage().nbytes():
            return False
    return True


def _guard_of(tensors: Sequence[torch.Tensor]) -> Any:
    if _TENSOR_GUARDS is None:
        return None
    sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    return _TENSOR_GUARDS(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def _key_of(tensors: Sequence[torch.Tensor], options: tuple[object, ...]) -> tuple[object, ...] | None:
    """Return a key of everything that validation depends on; ``None`` for an input that has none.

    The dispatch keys of a tensor say what kind it is: dense, of a subclass, of a transform, quantised, conjugated, ...
    """
    key: list[object] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *options]
    try:
        for tensor in tensors:
            kind = torch._C._dispatch_keys(tensor).raw_repr()  # noqa: SLF001  there is no public query
            key += type(tensor), kind, tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad
        hash(result := tuple(key))
    except (TypeError, RuntimeError, AttributeError):  # no tensor, or one without strides; validation says which
        return None
    return result
