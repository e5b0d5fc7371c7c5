"""``weight_gradients`` against its PyTorch twin, bit for bit; size of its temporaries; arguments of its kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from comparison import assert_same_bits
from fusco.api import autograd as module
from fusco.api.autograd import Verbs, gradients_of_combine, weight_gradients
from fusco.api.handle import Handle
from fusco.cuda.kernels.weight_gradients import launch
from generator import random_of
from reference.weight_gradients import weight_gradients as reference

DTYPES = [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float64),
    (torch.float32, torch.float32),
    (torch.float32, torch.float64),
    (torch.float64, torch.float64),
]
SHAPES = [(0, 4), (1, 4), (3, 1), (4, 7), (9, 130), (5, 0)]


def inputs(num_rows: int, hidden: int, dtype: torch.dtype, weights_dtype: torch.dtype) -> list[torch.Tensor]:
    random = random_of(num_rows, hidden, dtype)
    grads, rows = (torch.randn(num_rows, hidden, generator=random, dtype=torch.float64).to(dtype) for _ in range(2))
    return [grads, rows, torch.rand(num_rows, generator=random, dtype=weights_dtype)]


@pytest.mark.parametrize(("dtype", "weights_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "hidden"), SHAPES)
def test_rows_at_a_time_give_the_bits_of_all_at_once(monkeypatch, num_rows, hidden, dtype, weights_dtype):
    grads, rows, weights = inputs(num_rows, hidden, dtype, weights_dtype)
    expected, expected_dots = reference(grads, rows, weights)
    for rows_at_once in (3, 4096):
        monkeypatch.setattr(module, "_ROWS_AT_ONCE", rows_at_once)
        weighted, alone = grads.clone(), grads.clone()
        assert_same_bits(weight_gradients(weighted, rows, weights), expected_dots, "dots")
        assert_same_bits(weighted, expected, "weighted rows")
        assert weight_gradients(alone, None, weights) is None
        assert_same_bits(alone, expected, "weighted rows without dots")


class Largest(TorchDispatchMode):
    """The size in bytes of the largest new tensor."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.num_bytes = max(self.num_bytes, tensor.nbytes)
        return result


def test_no_temporary_is_as_large_as_the_rows(monkeypatch):
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", 16)
    grads, rows, weights = inputs(160, 64, torch.bfloat16, torch.float32)
    with Largest() as largest:
        weight_gradients(grads, rows, weights)
    assert 0 < largest.num_bytes <= 16 * 64 * 4


class Library:
    """A fake ``Library`` that keeps the arguments of launches."""

    num_sms = 2

    def __init__(self) -> None:
        self.launches: list[tuple[str, Any, Any, Any]] = []

    def get(self, name: str, constants: Any) -> Library:
        self.constants = (name, constants)
        return self

    def launch(self, arguments: Any, stream: int, **grid: int) -> None:
        self.launches.append((*self.constants, arguments, {"stream": stream, **grid}))


@pytest.mark.parametrize(("hidden", "width"), [(130, 2), (8, 8), (33, 1)])
def test_what_the_kernel_is_told(hidden, width):
    grads, rows, weights = inputs(9, hidden, torch.bfloat16, torch.float32)
    library: Any = Library()
    dots = launch(library, 7, grads, rows, weights)
    ((name, constants, arguments, grid),) = library.launches
    assert (name, grid) == ("weight_gradients", {"stream": 7, "grid": 2, "num_threads": 256})
    assert [constants[key] for key in ("HIDDEN", "ROW_TYPE", "WEIGHT_BYTES", "HAS_DOTS")] == [hidden, "BF16", 4, 1]
    assert constants["VECTOR_ELEMENTS"] == width
    assert (dots.dtype, dots.shape, arguments.dots, arguments.num_rows) == (torch.float32, (9,), dots.data_ptr(), 9)
    addresses = (arguments.grads, arguments.rows, arguments.weights)
    assert addresses == tuple(tensor.data_ptr() for tensor in (grads, rows, weights))


def test_the_kernel_reads_rows_where_they_are_aligned_and_contiguous():
    grads, rows, weights = inputs(9, 8, torch.bfloat16, torch.float32)
    for apart in (rows.T.contiguous().T, torch.cat([rows.new_zeros(1), rows.view(-1)])[1:].view(9, 8)):
        library: Any = Library()
        launch(library, 7, grads, apart, weights)
        ((_, _, arguments, _),) = library.launches
        assert arguments.rows % 16 == 0
        assert arguments.rows != apart.data_ptr()


def test_nothing_is_launched_for_no_rows_or_columns():
    for shape in ((0, 4), (5, 0)):
        library: Any = Library()
        assert launch(library, 7, *inputs(*shape, torch.float32, torch.float32)).tolist() == [0.0] * shape[0]
        assert not library.launches


@dataclass(frozen=True)
class Slots:
    """A plan for gradients only: every slot's row is for its token's only expert, token after token."""

    slot_weights: torch.Tensor

    num_topk = 1

    @property
    def num_slots(self) -> int:
        return len(self.slot_weights)

    @property
    def slot_to_k(self) -> torch.Tensor:
        return torch.zeros(self.num_slots, dtype=torch.int64)


def test_combines_backward_makes_no_other_rows_either(monkeypatch):
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", 16)
    grad_out, y, weights = inputs(160, 64, torch.bfloat16, torch.float32)
    expected, dots = reference(grad_out, y, weights)
    plan: Any = Slots(weights)
    verbs = Verbs(lambda rows, _: rows, lambda rows, _: rows, lambda many, _: many)
    with Largest() as largest:
        grad_y, grad_weights = gradients_of_combine(grad_out, y, Handle(plan, weights[:, None], 0), verbs)
    assert largest.num_bytes <= 16 * 64 * 4
    assert_same_bits(grad_y, expected, "gradients of rows")
    assert_same_bits(grad_weights, dots[:, None], "gradients of weights")


def test_autocast_rounds_no_dot_product():
    grads, rows, weights = inputs(9, 130, torch.float32, torch.float32)
    _, expected = reference(grads, rows, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dots = weight_gradients(grads, rows, weights)
    assert dots is not None
    assert_same_bits(dots, expected, "dots")
