"""Functions on ranks: models and arguments that fusco.fsdp refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import SEQUENCE, loss_sum, make_batch, make_model
from fsdp_runs import LIMIT_S, Run, mesh_of
from torch import nn
from torch.distributed.tensor import DTensor

from fusco import ClosedError, MismatchError, Settings, fsdp


def error_of_undistributed_experts(_: dist.ProcessGroup) -> str:
    """Return the error of the implementation for experts that are not distributed."""
    model = make_model("mixtral")
    group, settings = mesh_of(2, 1).ep_group, Settings(timeout_s=LIMIT_S)
    with fsdp.registered_as_experts_implementation(group, SEQUENCE, name="other", settings=settings):
        model.set_experts_implementation("other")
        with pytest.raises(ValueError, match="distribute its parameters") as error:
            loss_sum(model, make_batch(0, 1))
    return str(error.value)


def error_of(_: dist.ProcessGroup, run: Run, changes: dict[str, int], seed_by_rank: bool = False) -> str:
    """Return the error of ``parallelize`` for changed sizes, or for weights that differ between ranks."""
    mesh = mesh_of(run.ep_size, run.dp_replicate)
    model = make_model(run.kind, **changes)
    if seed_by_rank:
        with torch.no_grad():
            model.model.layers[1].mlp.gate.weight.add_(dist.get_rank())
    try:
        dispatcher, sharding = fsdp.TorchDispatcher(mesh.ep_group), fsdp.Sharding(expert_dim=run.expert_dim)
        fsdp.parallelize(
            model, mesh, dispatcher, sharding, activation_checkpointing=run.recomputes, balance=run.balance
        )
    except ValueError as error:
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        return str(error)
    return "none"


def errors_of_misuse(_: dist.ProcessGroup) -> dict[str, str]:
    """Return the errors of ``parallelize`` for invalid dispatchers and models."""
    mesh, rank = mesh_of(2, 1), dist.get_rank()
    dispatcher, others = fsdp.TorchDispatcher(mesh.ep_group), fsdp.TorchDispatcher(mesh.expert["efsdp"].get_group())
    with fsdp.parameters_on_meta():
        on_meta = make_model("qwen3")
    once = make_model("qwen3")
    fsdp.parallelize(once, mesh, dispatcher)
    otherwise = make_model("qwen3")
    otherwise.model.layers[1].mlp.experts._apply_gate = lambda hidden: hidden.chunk(2, dim=-1)[0]
    otherwise.model.layers[1].mlp.experts.forward = make_model("qwen3").model.layers[1].mlp.experts.forward
    without_group: Any = SimpleNamespace()  # an AttributeError, on one rank only
    mixed = make_model("qwen3")
    mixed.model.layers[1].mlp.gate.double()
    mistakes = {
        "no dispatcher on rank 1": (make_model("qwen3"), without_group if rank == 1 else dispatcher),
        "two dtypes": (mixed, dispatcher),
        "another formula on rank 1": (otherwise if rank == 1 else make_model("qwen3"), dispatcher),
        "another group": (make_model("qwen3"), others),
        "another group on rank 1": (make_model("qwen3"), others if rank == 1 else dispatcher),
        "values on rank 0": (make_model("qwen3") if rank == 0 else on_meta, dispatcher),
        "twice": (once, dispatcher),
        "no forward": (nn.ModuleDict({"layer": make_model("qwen3").model.layers[0]}), dispatcher),
    }
    errors = {}
    for name, (model, given) in mistakes.items():
        before = [(id(parameter), type(parameter)) for parameter in model.parameters()]
        with pytest.raises((ValueError, AttributeError)) as error:  # the text is looked at by the test
            fsdp.parallelize(model, mesh, given)
        errors[name] = str(error.value)
        assert before == [(id(parameter), type(parameter)) for parameter in model.parameters()]
    return errors


def error_of_mesh(_: dist.ProcessGroup, ep_size: int, dp_replicate: int) -> str:
    """Return the error of ``build_mesh``."""
    try:
        fsdp.build_mesh(ep_size, dp_replicate)
    except ValueError as error:
        return str(error)
    return "none"


def error_of_too_many_tokens(_: dist.ProcessGroup) -> str:
    """Return the error of a dispatcher made for one token, for a larger batch."""
    mesh = mesh_of(2, 1)
    model = make_model("qwen3")
    batch = make_batch(0, 1)
    error_text = "none"
    with fsdp.FuscoDispatcher(mesh.ep_group, 1, settings=Settings(timeout_s=LIMIT_S)) as dispatcher:
        fsdp.parallelize(model, mesh, dispatcher)
        try:
            loss_sum(model, batch)
        except ValueError as error:
            error_text = str(error)
    with pytest.raises(ClosedError, match="the dispatcher is closed"):
        loss_sum(model, batch)
    return error_text


def errors_of_one_rank(group: dist.ProcessGroup) -> list[str]:
    """Return the errors of a dispatcher of which rank 1 passes what is not (num_tokens, hidden), at first and later."""
    errors, topk_idx = [], torch.zeros(3, 1, dtype=torch.int64)
    with fsdp.FuscoDispatcher(group, 8, settings=Settings(timeout_s=LIMIT_S)) as dispatcher:
        for _ in range(2):
            x = torch.ones(3, 4)
            with pytest.raises(ValueError, match="two dimensions") as error:
                dispatcher.dispatch(x[0] if dist.get_rank() else x, topk_idx, torch.ones(3, 1), 2)
            errors.append(f"{type(error.value).__name__}: {error.value}")
            arrival = dispatcher.dispatch(x, topk_idx, torch.ones(3, 1), 2)
            assert torch.equal(dispatcher.combine(arrival.rows, arrival), x)
    return errors


def errors_of_other_rows_on_one_rank(group: dist.ProcessGroup, pairs: list[tuple[int, torch.dtype]]) -> list[str]:
    """Return the errors of a dispatcher of which rank 1 passes rows of another hidden size or dtype, at first too.

    All ranks may do so: it makes another communicator. Then rank 1 passes rows for another of those that there are.
    """
    errors, topk_idx, hidden = [], torch.zeros(3, 1, dtype=torch.int64), 4
    with fsdp.FuscoDispatcher(group, 8, settings=Settings(timeout_s=LIMIT_S)) as dispatcher:

        def dispatch(x: torch.Tensor) -> fsdp.Arrival:
            return dispatcher.dispatch(x, topk_idx, torch.ones(3, 1), 2)

        for each in (pairs[0], *pairs):
            other = torch.ones(3, each[0], dtype=each[1])
            with pytest.raises(MismatchError) as error:
                dispatch(other if dist.get_rank() else torch.ones(3, hidden))
            errors.append(str(error.value))
            x = torch.ones(3, hidden)
            arrival = dispatch(x)
            assert torch.equal(dispatcher.combine(arrival.rows, arrival), x)
        for each in pairs:
            x = torch.ones(3, each[0], dtype=each[1])
            arrival = dispatch(x)
            assert torch.equal(dispatcher.combine(arrival.rows, arrival), x)
        for first, second in (pairs[:2], pairs[1::-1], pairs[-2:]):  # the last one is of the latest communicator
            mine, others = (torch.ones(3, each[0], dtype=each[1]) for each in (first, second))
            with pytest.raises(MismatchError) as error:
                dispatch(others if dist.get_rank() else mine)
            errors.append(str(error.value))
        arrival = dispatch(x)
        assert torch.equal(dispatcher.combine(arrival.rows, arrival), x)
    return errors


def check_wide_sums_of_narrow_rows(group: dist.ProcessGroup) -> None:
    """Rows in bfloat16 whose partial sums travel between nodes in float32."""
    settings, topk_idx = Settings(timeout_s=LIMIT_S, wire_dtype=torch.float32), torch.zeros(3, 1, dtype=torch.int64)
    with fsdp.FuscoDispatcher(group, 8, ranks_per_node=1, settings=settings) as dispatcher:
        x = torch.ones(3, 64, dtype=torch.bfloat16)
        arrival = dispatcher.dispatch(x, topk_idx, torch.ones(3, 1), 2)
        assert torch.equal(dispatcher.combine(arrival.rows, arrival), x)
