"""Gradients of ``combine`` without any rank: what is made of the rows that a dispatch brings, and at what cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from comparison import assert_same_bits
from fusco import autograd
from fusco.autograd import Verbs, gradients_of_combine
from fusco.handle import Handle


@dataclass(frozen=True)
class Slots:
    """What gradients need of a plan where every slot's row is for its token's only expert, token after token."""

    slot_weights: torch.Tensor

    @property
    def num_slots(self) -> int:
        return len(self.slot_weights)

    @property
    def num_topk(self) -> int:
        return 1

    @property
    def slot_to_k(self) -> torch.Tensor:
        return torch.zeros(self.num_slots, dtype=torch.int64)


VERBS = Verbs(dispatch=lambda rows, _: rows.clone(), combine=lambda rows, _: rows.clone())


def inputs(num_slots: int, hidden: int, dtype: torch.dtype, weights_dtype: torch.dtype):
    random = torch.Generator().manual_seed(num_slots * 1000 + hidden)
    grad_out, y = (torch.randn(num_slots, hidden, generator=random, dtype=torch.float64).to(dtype) for _ in range(2))
    weights = torch.rand(num_slots, 1, generator=random, dtype=weights_dtype)
    plan: Any = Slots(weights[:, 0].clone())
    return grad_out, y, Handle(plan, weights, 0)


@pytest.mark.parametrize(
    ("dtype", "weights_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float64),
        (torch.float32, torch.float32),
        (torch.float32, torch.float64),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize(("num_slots", "hidden"), [(0, 4), (1, 4), (3, 1), (4, 7), (9, 130)])
def test_rows_at_a_time_give_the_bits_of_all_at_once(monkeypatch, num_slots, hidden, dtype, weights_dtype):
    grad_out, y, handle = inputs(num_slots, hidden, dtype, weights_dtype)
    wide = torch.promote_types(dtype, torch.float32)
    dots = torch.linalg.vecdot(grad_out.to(wide), y.to(wide))
    expected = (grad_out * handle.plan.slot_weights[:, None]).to(dtype)
    for rows_at_once in (3, 4096):
        monkeypatch.setattr(autograd, "_ROWS_AT_ONCE", rows_at_once)
        grad_y, grad_weights = gradients_of_combine(grad_out, y, handle, VERBS)
        assert_same_bits(grad_y, expected, "gradients of rows")
        assert_same_bits(grad_weights, dots[:, None].to(weights_dtype), "gradients of weights")
        grad_y, none = gradients_of_combine(grad_out, None, handle, VERBS)
        assert_same_bits(grad_y, expected, "gradients of rows alone")
        assert none is None


def test_without_weights_rows_stay_as_they_are():
    grad_out, _, handle = inputs(5, 3, torch.float32, torch.float32)
    grad_y, none = gradients_of_combine(grad_out, None, handle.unweighted(), VERBS)
    assert_same_bits(grad_y, grad_out, "gradients of rows")
    assert none is None


class Largest(TorchDispatchMode):
    """The most bytes that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.num_bytes = max(self.num_bytes, tensor.nbytes)
        return result


def test_nothing_as_large_as_the_rows_is_made_beside_them(monkeypatch):
    monkeypatch.setattr(autograd, "_ROWS_AT_ONCE", 16)
    grad_out, y, handle = inputs(160, 64, torch.bfloat16, torch.float32)
    verbs = Verbs(dispatch=lambda rows, _: rows, combine=VERBS.combine)
    with Largest() as largest:
        gradients_of_combine(grad_out, y, handle, verbs)
    assert largest.num_bytes <= 16 * 64 * 4
