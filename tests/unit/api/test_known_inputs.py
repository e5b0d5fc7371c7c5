"""An input that was validated once is recognised, and nothing else is."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusco import Capacity, ExpertPlacement
from fusco.api import known_inputs
from fusco.api.known_inputs import KnownInputs
from fusco.api.validation import Validator
from fusco.control.fingerprint import CollectiveFingerprint
from fusco.planner.balancer import balance_send_and_receive

FINGERPRINT = CollectiveFingerprint("dispatch", {"payloads": ["float32[4]"]})
X = torch.zeros(3, 4)


@pytest.fixture(params=["guards", "keys"], autouse=True)
def comparison(request, monkeypatch):
    """With PyTorch's guards, and as where it has none."""
    if request.param == "keys":
        monkeypatch.setattr(known_inputs, "_TENSOR_GUARDS", None)


def known(tensor: torch.Tensor = X) -> KnownInputs:
    inputs = KnownInputs()
    inputs.add(FINGERPRINT, (tensor,), ("dispatch", 1))
    return inputs


def finds(inputs: KnownInputs, tensor: object, *options: object) -> bool:
    found = inputs.find((tensor,), options or ("dispatch", 1))  # type: ignore[arg-type]
    assert found is None or found.fingerprint is FINGERPRINT
    return found is not None


def freed() -> torch.Tensor:
    tensor = torch.zeros(3, 4)
    tensor.untyped_storage().resize_(8)
    return tensor


OTHERS = {
    "other values": (lambda: torch.ones(3, 4), True),
    "part of a larger one": (lambda: torch.ones(6, 4)[3:], True),
    "other tokens": (lambda: torch.zeros(2, 4), False),
    "other strides": (lambda: torch.zeros(4, 3).T, False),
    "other dtype": (lambda: torch.zeros(3, 4, dtype=torch.float64), False),
    "with gradients": (lambda: torch.zeros(3, 4, requires_grad=True), False),
    "a parameter": (lambda: torch.nn.Parameter(torch.zeros(3, 4), requires_grad=False), False),
    "on another device": (lambda: torch.zeros(3, 4, device="meta"), False),
    "sparse": (lambda: torch.zeros(3, 4).to_sparse(), False),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(4)] * 3), False),
    "negated": (lambda: torch._neg_view(torch.zeros(3, 4)), False),
    "freed": (freed, False),
    "no tensor": (lambda: [0.0] * 4, False),
    "a class": (lambda: torch.Tensor, False),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", OTHERS)
def test_an_input_is_known_if_only_values_and_addresses_differ(kind):
    make, is_known = OTHERS[kind]
    assert finds(known(), make()) is is_known


def test_other_options_are_another_input():
    inputs = known()
    assert finds(inputs, X, "dispatch", 1)
    assert not finds(inputs, X, "dispatch", 2)
    assert not finds(inputs, X, "combine", 1)


def test_gradients_that_are_off_are_another_input():
    with_gradients = torch.zeros(3, 4, requires_grad=True)
    inputs = known(with_gradients)
    assert finds(inputs, with_gradients)
    with torch.no_grad():
        assert not finds(inputs, with_gradients)


def test_nothing_is_known_where_nothing_can_be_moved_and_in_inference_mode():
    inputs, found = known(), []

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append(finds(inputs, X))
        return x.sum()

    torch.func.grad(function)(torch.ones(3))
    torch.func.vmap(function)(torch.ones(3))
    make_fx(function)(torch.ones(3))
    for context in (FakeTensorMode(), torch.inference_mode()):
        with context:
            function(torch.ones(3))
    assert found == [False] * 5
    assert finds(inputs, X)


def test_tangents_are_not_overlooked():
    inputs = known()
    with torch.autograd.forward_ad.dual_level():
        assert not finds(inputs, torch.autograd.forward_ad.make_dual(X, X))


def test_several_inputs_in_turn_are_all_known():
    inputs, other = known(), torch.zeros(7, 4)
    inputs.add(FINGERPRINT, (other,), ("dispatch", 1))
    for tensor in (X, other, X, other):
        assert finds(inputs, tensor)


def test_a_second_dispatch_is_not_validated_in_full_and_a_wrong_one_is():
    validator = Validator(
        rank=0,
        placement=ExpertPlacement.contiguous(4, 1),
        balancer=balance_send_and_receive,
        capacity=Capacity(max_tokens_per_rank=8, max_bytes_per_token=64, num_topk=2),
        wire_dtype=None,
        device=torch.device("cpu"),
    )
    ids = torch.zeros(3, 2, dtype=torch.int64)
    first = validator.validate_dispatch([X], ids, None)
    assert first.known is None
    with mock.patch.object(Validator, "require_payloads", side_effect=AssertionError):
        second = validator.validate_dispatch([torch.ones(3, 4)], ids, None)
    assert second.known is not None
    assert second.known.fingerprint.fields == first.fields
    with pytest.raises(ValueError, match=r"topk_idx\[2, 1\] = 4 is not an expert"):
        validator.validate_dispatch([X], torch.tensor([[0, 0], [0, 0], [0, 4]]), None)
    with pytest.raises(TypeError, match="has 48 bytes of elements, but its storage has 8"):
        validator.validate_dispatch([freed()], ids, None)
    with pytest.raises(ValueError, match="payload 0 has shape"):
        validator.validate_dispatch([torch.zeros(2, 4)], ids, None)


def test_of_many_sizes_those_used_lately_are_known():
    """As in training with other numbers of tokens in each step."""
    inputs, tensors = KnownInputs(), [torch.zeros(size, 1) for size in range(1, 1101)]
    for tensor in tensors:
        inputs.add(FINGERPRINT, (tensor,), ("dispatch", 1))
        finds(inputs, tensors[0])
    assert [finds(inputs, tensors[at]) for at in (0, 1, 60, 80, 600, 1099)] == [True, False, False, True, True, True]
