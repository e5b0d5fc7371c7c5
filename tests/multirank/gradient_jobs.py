"""Functions on ranks: a layer of experts, its gradients, and the same layer without communication."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_setup import Setup, poison_recycler

import fusco
from fusco.api.validation import Validator
from generator import Case, values

HIDDEN = 3


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer to differentiate.

    Attributes:
        weighted_by: ``"combine"``, ``"experts"`` (which get the weights of their rows), or ``"none"``.
        wants: the inputs that require gradients, of ``"x"`` and ``"weights"``.
        alignment: padding of each expert's block.
        dtype: of rows.
        weights_dtype: of weights; ``None`` means that of rows.

    """

    weighted_by: str = "combine"
    wants: tuple[str, ...] = ("x", "weights")
    alignment: int = 1
    dtype: torch.dtype = torch.float64
    weights_dtype: torch.dtype | None = None


def expert_function(expert: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Apply experts to rows: nonlinear, and different for each expert and column."""
    slope = torch.linspace(0.5, 1.5, rows.shape[1], dtype=rows.dtype)
    return torch.tanh(rows * slope + 0.1 * expert[:, None].to(rows.dtype)) + rows.flip(1) * 0.3


def inputs_of(case: Case, layer: Layer, rank: int) -> dict[str, torch.Tensor]:
    """A rank's ``x`` and ``weights``; leaves."""
    tensors = {
        "x": values((case.num_tokens(rank), HIDDEN), layer.dtype, case.seed, "x", rank),
        "weights": case.topk_weights(rank, layer.weights_dtype or layer.dtype),
    }
    return {name: tensor.requires_grad_(name in layer.wants) for name, tensor in tensors.items()}


def cotangent_of(case: Case, layer: Layer, rank: int) -> torch.Tensor:
    """Factors of a rank's outputs in its loss."""
    return values((case.num_tokens(rank), HIDDEN), layer.dtype, case.seed, "cotangent", rank)


def forward(comm: fusco.Communicator, case: Case, layer: Layer, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """This rank's outputs of the layer."""
    is_given = layer.weighted_by != "none"
    dispatched = comm.dispatch(
        inputs["x"],
        case.topk_idx(comm.rank),
        inputs["weights"] if is_given else None,
        expert_alignment=layer.alignment,
        with_weights=layer.weighted_by == "experts",
    )
    rows_of_each = dispatched.num_rows_per_expert + (-dispatched.num_rows_per_expert % layer.alignment)
    experts = torch.tensor(comm.placement.rank_to_experts[comm.rank], dtype=torch.int64)
    y = expert_function(experts.repeat_interleave(rows_of_each), dispatched.rows)
    if layer.weighted_by != "experts":
        return comm.combine(y, dispatched.handle)
    assert dispatched.weights is not None
    return comm.combine((y * dispatched.weights[:, None]).to(y.dtype), dispatched.handle, weights=None)


def forward_alone(case: Case, layer: Layer, rank: int, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the same outputs without fusco: each rank applies all experts to its tokens."""
    out = torch.zeros(case.num_tokens(rank), HIDDEN, dtype=layer.dtype)
    ids = case.topk_idx(rank)
    for k in range(case.num_topk):
        has_expert = (ids[:, k] >= 0).to(layer.dtype)[:, None]
        weight = 1.0 if layer.weighted_by == "none" else inputs["weights"][:, k, None]
        out = out + (has_expert * weight * expert_function(ids[:, k], inputs["x"])).to(layer.dtype)
    return out


def grads_of(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    return {name: tensor.grad for name, tensor in inputs.items()}


def differences_from_slopes(group: dist.ProcessGroup, setup: Setup, layer: Layer, cases: Sequence[Case]) -> float:
    """Largest difference between the gradients and central differences of the sum of all ranks' losses.

    Inputs of one name are shifted at a time, those of all ranks in a random direction.
    """
    worst = 0.0
    with setup.open(group) as comm:
        poison_recycler(comm, setup)
        for case in cases:
            inputs = inputs_of(case, layer, comm.rank)
            cotangent = cotangent_of(case, layer, comm.rank)
            (forward(comm, case, layer, inputs) * cotangent).sum().backward()
            for name in layer.wants:
                shift = 1e-5 * values(inputs[name].shape, torch.float64, case.seed, "direction", name, comm.rank)
                sums = [(inputs[name].grad * shift).sum()]
                for sign in (1, -1):
                    shifted = {key: tensor.detach() for key, tensor in inputs.items()}
                    shifted[name] = shifted[name] + sign * shift
                    sums.append((forward(comm, case, layer, shifted) * cotangent).sum())
                slope, above, below = _sum_of_ranks(group, sums)
                worst = max(worst, abs((above - below) / 2 - slope) / 1e-5)
    return worst


def _sum_of_ranks(group: dist.ProcessGroup, numbers: Sequence[torch.Tensor]) -> list[float]:
    total = torch.stack(list(numbers))
    dist.all_reduce(total, group=group)
    return total.tolist()


def differences_from_a_layer_alone(
    group: dist.ProcessGroup, setup: Setup, layer: Layer, kinds: Sequence[str]
) -> dict[str, float]:
    """Largest relative difference of outputs and gradients from those of the same layer without communication."""
    worst = dict.fromkeys(("out", *layer.wants), 0.0)
    with setup.open(group) as comm:
        poison_recycler(comm, setup)
        for seed, kind in enumerate(kinds):
            case = setup.case(kind, seed, comm.topology.world_size)
            layers = (
                lambda inputs, case=case: forward(comm, case, layer, inputs),
                lambda inputs, case=case: forward_alone(case, layer, comm.rank, inputs),
            )
            results = []
            for run in layers:
                inputs = inputs_of(case, layer, comm.rank)
                out = run(inputs)
                assert out.requires_grad
                (out * cotangent_of(case, layer, comm.rank)).sum().backward()
                results.append({"out": out.detach(), **grads_of(inputs)})
            assert results[0].keys() == results[1].keys()
            for name in ("x", "weights"):
                assert name in layer.wants or results[0][name] is None
            for name in worst:
                ours, expected = results[0][name], results[1][name]
                assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype)
                if ours.numel():
                    scale = max(1.0, expected.double().abs().max().item())
                    worst[name] = max(worst[name], (ours.double() - expected.double()).abs().max().item() / scale)
    return worst


def check_graphs(group: dist.ProcessGroup, setup: Setup) -> None:
    """No graph without gradients; two layers in a row; a backward pass twice; rows of several dimensions."""
    with setup.open(group) as comm:
        case, layer = setup.case("ragged", 3, comm.topology.world_size), Layer()

        inputs = inputs_of(case, layer, comm.rank)
        with torch.no_grad():
            assert not forward(comm, case, layer, inputs).requires_grad
        assert not forward(comm, case, layer, {name: t.detach() for name, t in inputs.items()}).requires_grad

        alone = inputs_of(case, layer, comm.rank)
        twice = forward(comm, case, layer, {**inputs, "x": forward(comm, case, layer, inputs)})
        twice_alone = forward_alone(
            case, layer, comm.rank, {**alone, "x": forward_alone(case, layer, comm.rank, alone)}
        )
        for _ in range(2):
            twice.sum().backward(retain_graph=True)
            twice_alone.sum().backward(retain_graph=True)
        for name in layer.wants:
            torch.testing.assert_close(inputs[name].grad, alone[name].grad)

        weights = (inputs["weights"] * 1.0).to(setup.device)  # on a GPU others would be copied when they are sent
        sent = comm.dispatch(inputs["x"], case.topk_idx(comm.rank), weights)
        weights.mul_(2)
        with pytest.raises(ValueError, match="changed in place since their dispatch"):
            comm.combine(sent.rows, sent.handle)
        assert comm.combine(sent.rows, sent.handle, weights=None).requires_grad

        x = values((case.num_tokens(comm.rank), 2, 3), torch.float64, "x", comm.rank).requires_grad_()
        rows = comm.dispatch(x, case.topk_idx(comm.rank)).rows
        (rows * 2).sum().backward()
        copies = (case.topk_idx(comm.rank) >= 0).sum(1).double()
        torch.testing.assert_close(x.grad, 2 * copies[:, None, None].expand_as(x))

        x = torch.view_as_complex(x.detach()[..., :2].contiguous()).requires_grad_()
        rows = comm.dispatch(x, case.topk_idx(comm.rank)).rows
        for _ in range(2):
            (rows.conj() * rows).real.sum().backward(retain_graph=True)  # the gradient of a copy z is 2 z
        torch.testing.assert_close(x.grad, 4 * copies[:, None] * x.detach())


@contextlib.contextmanager
def launches() -> Iterator[list[tuple[str, fusco.Launch | None]]]:
    """Record the launch options of each collective that moves rows, in order."""
    seen: list[tuple[str, fusco.Launch | None]] = []
    dispatch, again, combine = Validator.validate_dispatch, Validator.validate_redispatch, Validator.validate_combine

    def dispatching(self, payloads, topk_idx, topk_weights, alignment, with_weights, static, launch, *more):
        seen.append(("dispatch", launch))
        return dispatch(self, payloads, topk_idx, topk_weights, alignment, with_weights, static, launch, *more)

    def dispatching_again(self, payloads, handle, launch=None, *more):
        seen.append(("dispatch_again", launch))
        return again(self, payloads, handle, launch, *more)

    def combining(self, verb, ys, handle, weights="topk", launch=None):
        seen.append((verb, launch))
        return combine(self, verb, ys, handle, weights, launch)

    with mock.patch.multiple(
        Validator, validate_dispatch=dispatching, validate_redispatch=dispatching_again, validate_combine=combining
    ):
        yield seen


def launches_of_gradients(group: dist.ProcessGroup, setup: Setup) -> list[tuple[str, fusco.Launch | None]]:
    """Launch options of the backward pass of a dispatch, a combine and a dispatch again, each with different ones."""
    with setup.open(group) as comm:
        inputs = inputs_of(setup.case("ragged", 3, comm.topology.world_size), Layer(), comm.rank)
        topk_idx = setup.case("ragged", 3, comm.topology.world_size).topk_idx(comm.rank)
        launch_of = {name: fusco.Launch(num_sms=i + 1, own_stream=True) for i, name in enumerate("dca")}
        sent = comm.dispatch(inputs["x"], topk_idx, inputs["weights"], launch=launch_of["d"])
        out = comm.combine(sent.rows, sent.handle, launch=launch_of["c"])
        (again,) = comm.dispatch_again(out, sent.handle, launch=launch_of["a"])
        with launches() as seen:
            again.sum().backward()
    return seen
