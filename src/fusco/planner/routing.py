"""Routing of one rank, as the router returns it, with validation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

INDEX_DTYPES = (torch.int32, torch.int64)
# Added to an id that is no expert, but would be a physical one: then it is neither.
UNPLACED = -(2**31)
WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Routing:
    """``topk_idx[t, k]`` is the k-th expert of token ``t``, or -1; ``topk_weights[t, k]`` its weight.

    ``topk_idx`` is int32 or int64 (num_tokens, num_topk); ``topk_weights``, if any, is float16, bfloat16, float32 or
    float64, of the same shape.

    Raises ``TypeError`` for a wrong dtype and ``ValueError`` for a wrong shape, with the value.
    """

    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.topk_idx, torch.Tensor):
            raise TypeError(f"topk_idx must be a tensor, got {type(self.topk_idx).__name__}")
        if self.topk_weights is not None and not isinstance(self.topk_weights, torch.Tensor):
            raise TypeError(f"topk_weights must be a tensor, got {type(self.topk_weights).__name__}")
        if self.topk_idx.dtype not in INDEX_DTYPES:
            raise TypeError(f"topk_idx must be int32 or int64, got {self.topk_idx.dtype}")
        if self.topk_idx.ndim != 2:
            raise ValueError(f"topk_idx must be (num_tokens, num_topk), got shape {tuple(self.topk_idx.shape)}")
        if self.topk_weights is None:
            return
        if self.topk_weights.dtype not in WEIGHT_DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in WEIGHT_DTYPES)
            raise TypeError(f"topk_weights must be one of {allowed}, got {self.topk_weights.dtype}")
        if self.topk_weights.shape != self.topk_idx.shape:
            raise ValueError(
                f"topk_weights has shape {tuple(self.topk_weights.shape)}, topk_idx {tuple(self.topk_idx.shape)}; "
                f"they must be equal"
            )

    def check_expert_ids(self, num_experts: int, num_logical: int | None = None) -> None:
        """Raise ``ValueError`` with the first id outside -1 .. num_experts - 1 and its indices.

        With ``num_logical``, ids are of physical experts, and the error is about the caller's ids.
        """
        if not self.topk_idx.numel():
            return
        low, high = (int(bound) for bound in self.topk_idx.aminmax())
        if low >= -1 and high < num_experts:
            return
        is_outside = (self.topk_idx < -1) | (self.topk_idx >= num_experts)
        token, k = is_outside.nonzero()[0].tolist()
        num_logical = num_logical or num_experts
        expert_id = logical_id(int(self.topk_idx[token, k]), num_logical, num_experts)
        raise ValueError(describe_invalid_id(token, k, expert_id, num_logical))

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self.topk_idx.shape[0]

    @property
    def num_topk(self) -> int:
        """Experts per token (top-k)."""
        return self.topk_idx.shape[1]


def logical_id(invalid_id: int, num_logical: int, num_physical: int) -> int:
    """Return the caller's id that became an invalid physical one.

    Only ids that are physical and not logical have been changed, with the choice of owners: others are the caller's.

    >>> [logical_id(each, num_logical=8, num_physical=10) for each in (9 + UNPLACED, UNPLACED, 10, -2)]
    [9, -2147483648, 10, -2]
    """
    is_changed = UNPLACED + num_logical <= invalid_id < UNPLACED + num_physical
    return invalid_id - UNPLACED if is_changed else invalid_id


def describe_invalid_id(token: int, k: int, expert_id: int, num_experts: int) -> str:
    """Return the error message for an invalid expert id."""
    return (
        f"topk_idx[{token}, {k}] = {expert_id} is not an expert: ids go from 0 to {num_experts - 1}, and -1 means none"
    )


def routing_bytes_per_row(num_topk: int, weight_bytes: int) -> int:
    """Return the bytes of routing that are sent for one row: an int32 id and a weight for each of its experts."""
    return num_topk * (4 + weight_bytes)
