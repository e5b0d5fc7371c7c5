"""LoRA of peft on experts: two small products for each expert in place of the dense difference of its matrix.

Shapes: E experts of all ranks, L of this one, r the rank of an adapter.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import nn

from fusco.fsdp.grouped_linear import grouped_linear
from fusco.fsdp.mesh import local_part, local_values, whole_values

# What peft's ParamWrapper has, the only adapter of a parameter of three dimensions (peft 0.17 to 0.21).
_OF_PARAM_WRAPPER = ("parameter_name", "lora_A", "lora_B", "scaling", "num_experts")
_ALIGNMENT_BYTES = 16  # of rows in a grouped GEMM


class ExpertAdapter:
    """The adapters on one projection of a module of experts; replaces the ``forward`` of peft's wrapper of it.

    To the matrix of expert e, peft adds ``scaling * B_e @ A_e``, or its transpose. ``lora_A.weight``, (E * r,
    num_inputs), has the experts outermost, and ``lora_B.weight``, (num_outputs, r * E), innermost. These stay the
    parameters that peft made, which FSDP shards with the rest of the block: every rank gathers those of all experts and
    uses its own. So names, checkpoints and files are peft's, and FSDP adds up the gradients of all ranks.
    """

    def __init__(self, layer: Any, experts: nn.Module, first: int, num_local: int) -> None:
        """Take a wrapper (``ParamWrapper``) around ``experts``, of which this rank has some.

        ``first`` is the first of this rank's experts among those of all ranks, and ``num_local`` their number.
        """
        self.layer, self.parameter = layer, str(layer.parameter_name)
        self._experts, self._first, self._num_local = experts, first, num_local
        self._is_called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is wrapped, which asks for ``weights``."""
        if kwargs.pop("adapter_names", None) is not None:
            raise ValueError("adapters of experts cannot differ within a batch: call the model without adapter_names")
        if self.layer.disable_adapters and self.layer.merged:
            self.layer.unmerge()
        self._is_called = True
        try:
            return self.layer.base_layer(*args, **kwargs)
        finally:
            self._is_called = False

    def weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return two stacks of matrices for each active adapter, by the names that ``add_products`` uses.

        They are (L, num_inputs, r) and (L, r, num_outputs), with zeros added to r up to whole 16 bytes. There are none
        outside of a call of the wrapper, where adapters are merged or disabled.
        """
        if not self._is_called or self.layer.disable_adapters or self.layer.merged:
            return {}
        stacks = {}
        for adapter in self.layer.active_adapters:
            if adapter in self.layer.lora_A:
                a, b = self._local_factors(adapter, dtype)
                missing = -a.shape[2] % (_ALIGNMENT_BYTES // dtype.itemsize)
                stacks[f"{self.parameter}.{adapter}.A"] = F.pad(a, (0, missing)).contiguous()
                stacks[f"{self.parameter}.{adapter}.B"] = F.pad(b, (0, 0, 0, missing)).contiguous()
        return stacks

    def add_products(
        self,
        out: torch.Tensor,
        rows: torch.Tensor,
        weights: Mapping[str, torch.Tensor],
        num_rows_per_expert: torch.Tensor,
        sizes: list[int] | None,
    ) -> torch.Tensor:
        """Return the projection's results (num_rows, num_outputs) with what the adapters add.

        ``weights`` contain what ``weights`` returned, or more experts of the same; the others are those of
        ``grouped_linear``.
        """
        for adapter in self.layer.lora_A:
            a, b = (weights.get(f"{self.parameter}.{adapter}.{half}") for half in "AB")
            if a is not None and b is not None:
                narrow = grouped_linear(rows, a, None, num_rows_per_expert, sizes) * self.layer.scaling[adapter]
                out = out + grouped_linear(narrow, b, None, num_rows_per_expert, sizes)
        return out

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:  # noqa: FBT001, FBT002  the signature is peft's
        """Add the adapters to this rank's part of the projection; a collective."""
        names = importlib.import_module("peft.tuners.tuners_utils").check_adapters_to_merge(self.layer, adapter_names)
        for adapter in names:
            if adapter in self.layer.lora_A:
                merged = self._local_projection() + self._local_delta(adapter)
                if safe_merge:
                    self._check_finite(adapter, merged)
                self._local_projection().copy_(merged)
                self.layer.merged_adapters.append(adapter)

    def unmerge(self) -> None:
        """Subtract the merged adapters; a collective."""
        while self.layer.merged_adapters:
            adapter = self.layer.merged_adapters.pop()
            if adapter in self.layer.lora_A:
                self._local_projection().sub_(self._local_delta(adapter))

    def _local_factors(self, adapter: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A (L, num_inputs, r) and B (L, r, num_outputs) of this rank's experts."""
        mine = slice(self._first, self._first + self._num_local)
        a, b = self._factors(adapter)
        return a[mine].to(dtype).transpose(1, 2), b[mine].to(dtype)

    def _factors(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A (E, r, num_inputs) and B (E, r, num_outputs), views of the whole parameters."""
        a, b = (whole_values(half[adapter].weight) for half in (self.layer.lora_A, self.layer.lora_B))
        num_experts = self.layer.num_experts
        return a.view(num_experts, -1, a.shape[1]), b.view(b.shape[0], -1, num_experts).permute(2, 1, 0)

    def _local_projection(self) -> torch.Tensor:
        stack: torch.Tensor = getattr(self._experts, self.parameter)
        return local_values(stack.detach())

    @torch.no_grad()
    def _local_delta(self, adapter: str) -> torch.Tensor:
        """Return what an adapter adds to this rank's part of the projection."""
        stack: torch.Tensor = getattr(self._experts, self.parameter)
        experts, rows, columns = local_part(stack)
        a, b = self._factors(adapter)
        left, right = (b, a) if is_output_first(self.layer) else (a, b)
        product = left[experts, :, rows].transpose(1, 2) @ right[experts, :, columns]
        return (product * self.layer.scaling[adapter]).to(stack.dtype)

    def _check_finite(self, adapter: str, merged: torch.Tensor) -> None:
        is_finite = merged.isfinite().all().to(torch.int32)
        if dist.is_initialized():
            dist.all_reduce(is_finite, dist.ReduceOp.MIN)
        if not is_finite:
            raise ValueError(f"adapter {adapter} makes values of {self.parameter} infinite or not a number")


def find_expert_adapters(name: str, module: nn.Module, model: nn.Module) -> list[Any]:
    """Return peft's wrappers around the experts ``module``, which is ``name`` in a model, the outermost first.

    Raises:
        ValueError: for another adapter around the experts, or one of another parameter than a projection.
    """
    parts, wrappers = name.split("."), []
    for length in (length for length, part in enumerate(parts) if part == "base_layer"):
        parent: Any = model.get_submodule(".".join(parts[:length]))
        known = all(hasattr(parent, attribute) for attribute in _OF_PARAM_WRAPPER)
        stack = getattr(module, parent.parameter_name, None) if known else None
        if stack is None or stack.ndim != 3 or set(parts[length:]) != {"base_layer"}:
            raise ValueError(
                f"{name} ({type(module).__name__}) is wrapped by an adapter, {type(parent).__name__}"
                f"{f' of {parent.parameter_name}' if known else ''}: of adapters on experts, fusco distributes LoRA of "
                f"peft on the projections only (target_modules='all-linear', or target_parameters), so leave experts "
                f"out of the adapter's targets, or merge it first (merge_and_unload)"
            )
        _check_shapes(f"{name}.{parent.parameter_name}", parent, stack)
        wrappers.append(parent)
    return wrappers


def is_output_first(layer: Any) -> bool:
    """Return whether peft takes the matrices of the wrapped parameter as (num_outputs, num_inputs)."""
    return bool(getattr(layer, "_did_swap_in_out_features", False))


def _check_shapes(name: str, layer: Any, stack: torch.Tensor) -> None:
    num_experts, *matrix = stack.shape
    inputs, outputs = reversed(matrix) if is_output_first(layer) else matrix
    for adapter in layer.lora_A:
        shapes: Sequence[Any] = [tuple(half[adapter].weight.shape) for half in (layer.lora_A, layer.lora_B)]
        columns = layer.r[adapter] * num_experts
        if shapes != [(columns, inputs), (outputs, columns)]:
            raise ValueError(
                f"adapter {adapter} of {name} {tuple(stack.shape)} has weights {shapes[0]} and {shapes[1]}, and fusco "
                f"expects {(columns, inputs)} and {(outputs, columns)} of rank {layer.r[adapter]}"
            )
