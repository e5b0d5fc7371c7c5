"""Tensors that can be moved as the bytes of their memory, and all others, each rejected with a reason."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from fusco.core.rows import why_not_movable, why_nothing_moves_here


class Named(torch.Tensor):
    """A subclass that behaves like a plain tensor."""


class Elsewhere(torch.Tensor):
    """A subclass whose values are in another tensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def freed() -> torch.Tensor:
    tensor = torch.ones(6)
    tensor.untyped_storage().resize_(8)
    return tensor


def seen_inside(transform, tensor: torch.Tensor) -> str:
    """Return why the tensors inside a transform cannot be moved."""
    found = []

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append(why_not_movable(x))
        return x.sum()

    transform(function)(tensor)
    return found[0]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 2),
        torch.ones(3, 2).T[1:],
        torch.ones(1).expand(5),
        torch.ones(2, 3).to(torch.float8_e4m3fn),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2).as_subclass(Named),
        torch.empty(0, 3)[:, 1],
        torch.ones(2, device="meta"),  # has another device, which is checked apart
    ],
)
def test_tensors_with_memory_can_be_moved(tensor):
    assert why_not_movable(tensor) == ""


def test_inference_tensors_can_be_moved():
    with torch.inference_mode():
        assert why_not_movable(torch.ones(2)) == ""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.ones(2, 2).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.ones(2, 2).to_mkldnn(), "layout torch._mkldnn"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "is a NestedTensor, a tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), r"quantised (torch.qint8)"),
        (lambda: torch.ones(2, dtype=torch.uint8).view(torch.qint8), r"quantised (torch.qint8)"),
        (lambda: FakeTensorMode().from_tensor(torch.ones(2)), "is a FakeTensor, a tensor subclass"),
        (lambda: Elsewhere(torch.ones(2)), "is a Elsewhere, a tensor subclass without its own memory"),
        (freed, "has 24 bytes of elements, but its storage has 8"),
    ],
)
def test_tensors_without_plain_memory_are_named(make, words):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes warn
        assert words in why_not_movable(make())


@pytest.mark.parametrize(
    "transform",
    [
        torch.func.grad,
        torch.func.vmap,
        lambda function: lambda x: torch.func.jvp(function, (x,), (x,)),
        lambda function: lambda x: torch.func.vjp(function, x),
    ],
)
def test_what_is_inside_a_transform_cannot_be_moved(transform):
    assert "torch.func" in seen_inside(transform, torch.ones(3))


def test_a_batch_of_gradients_cannot_be_moved():
    x, found = torch.ones(3, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda grad: found.append(why_not_movable(grad)))
    torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)
    assert found == [
        "is a batch of tensors (is_grads_batched=True, vectorize=True), which communication cannot pass through"
    ]


def test_what_has_a_tangent_cannot_be_moved():
    with forward_ad.dual_level():
        assert "tangent" in why_not_movable(forward_ad.make_dual(torch.ones(2), torch.ones(2)))
        assert why_not_movable(torch.ones(2)) == ""


def test_nothing_moves_inside_a_transform_or_a_trace():
    found = []

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append(why_nothing_moves_here())
        return x.sum()

    assert why_nothing_moves_here() == ""
    torch.func.grad(function)(torch.ones(3))
    torch.func.vmap(function)(torch.ones(3))
    make_fx(function)(torch.ones(3))
    with FakeTensorMode():
        function(torch.ones(3))
    assert ["torch.func" in why for why in found] == [True, True, False, False]
    assert ["traces" in why for why in found] == [False, False, True, True]
    assert why_nothing_moves_here() == ""
