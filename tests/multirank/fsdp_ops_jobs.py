"""Functions on ranks: dispatch and combine as operations, under selective checkpointing and torch.compile."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_models import SEQUENCE, alone, make_model
from fsdp_runs import Run, difference, dispatcher_of, mesh_of, parallel, step
from gradient_jobs import launches
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fusco import Launch, fsdp
from fusco.api import growth
from fusco.fsdp import ops
from fusco.fsdp.layer import ExpertParallelLayer

HIDDEN, NUM_EXPERTS = 16, 8


class Looking(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def noting() -> Iterator[list[str]]:
    """Note the name of each call of a communicator's dispatch, combine and their kin, in order."""
    calls: list[str] = []
    run_collective = growth.run_collective

    def noted(session: Any, engine: Any, name: str, *more: Any) -> Any:
        calls.append(name)
        return run_collective(session, engine, name, *more)

    with mock.patch.object(growth, "run_collective", noted):
        yield calls


def num_handles() -> int:
    """Return the number of handles that tickets keep alive."""
    return len(ops._key_to_held)


def verbs_of_a_step(_: dist.ProcessGroup, run: Run) -> dict[str, Counter[str]]:
    """Count the verbs in a step of a model of two layers, forward and backward."""
    with parallel(run) as (model, mesh):
        step(run, model, mesh)
        with noting() as forward:
            loss = model(input_ids=torch.zeros(1, SEQUENCE, dtype=torch.int64)).logits.sum()
        num_held = num_handles()
        with noting() as backward:
            loss.backward()
        del loss
        gc.collect()
        handles = Counter(held=num_held, left=num_handles())
        return {"forward": Counter(forward), "backward": Counter(backward), "handles": handles}


def launches_of_a_step(_: dist.ProcessGroup, run: Run) -> list[Launch | None]:
    """Return the launch options of all verbs in a step, forward and backward."""
    with parallel(run) as (model, mesh), launches() as seen:
        step(run, model, mesh)
    return [launch for _, launch in seen]


def order_of_a_step(_: dist.ProcessGroup, has_prefetch: bool) -> list[str]:
    """Return the order in which a step begins to gather parameters and calls the verbs."""
    events: list[str] = []
    unshard = FSDPParamGroup.unshard

    def gathering(self: FSDPParamGroup, async_op: bool = False) -> Any:
        if self._all_gather_result is None and not self.is_unsharded:
            events.append(f"gather {self._module_fqn}".replace(" model.", " "))
        return unshard(self, async_op)

    run = Run()
    with parallel(run, has_prefetch=has_prefetch) as (model, mesh):
        step(run, model, mesh)  # FSDP finds out who is whose child
        with noting() as events, mock.patch.object(FSDPParamGroup, "unshard", gathering):
            step(run, model, mesh)
    return events


def exchanges_of_a_step(_: dist.ProcessGroup, run: Run) -> dict[str, int]:
    """Count the row exchanges of TorchDispatcher in a step, forward and backward."""
    with parallel(run) as (model, _):
        with Looking() as forward:
            loss = model(input_ids=torch.zeros(1, SEQUENCE, dtype=torch.int64)).logits.sum()
        with Looking() as backward:
            loss.backward()
    name = "_c10d_functional::all_to_all_single"
    return {"forward": forward.calls[name], "backward": backward.calls[name]}


def host_waits_of_a_dispatch(_: dist.ProcessGroup) -> dict[str, int]:
    """Count the reads of tensor values by TorchDispatcher, which synchronise a CUDA host; forward and backward."""
    dispatcher, inputs = fsdp.TorchDispatcher(mesh_of(2, 1).ep_group), _inputs(7, ("x", "weights"))
    inputs["topk_idx"][0, 1] = -1
    waits: Counter[str] = Counter()
    tolist = torch.Tensor.tolist

    class Waits(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name, kwargs = func.name(), kwargs or {}
            is_sized = kwargs.get("output_size") is not None
            if name in ("aten::_local_scalar_dense", "aten::bincount", "aten::nonzero", "aten::_unique2") or (
                name == "aten::repeat_interleave.Tensor" and not is_sized
            ):
                waits[name] += 1
            return func(*args, **kwargs)

    def counted(self):
        waits["tolist"] += 1
        return tolist(self)

    with mock.patch.object(torch.Tensor, "tolist", counted), Waits():
        arrival = dispatcher.dispatch(inputs["x"], inputs["topk_idx"], inputs["weights"], NUM_EXPERTS)
        dispatcher.combine(arrival.rows * 3, arrival).sum().backward()
    return dict(waits)


def differences_from_verbs(_: dist.ProcessGroup, wants: tuple[str, ...]) -> dict[str, float]:
    """Return differences of operators from direct calls of the verbs: outputs and required gradients."""
    with dispatcher_of(Run(), mesh_of(2, 1)) as dispatcher:
        results = []
        for looking in (contextlib.nullcontext(), Looking()):
            inputs = _inputs(7, wants)
            with looking:
                arrival = dispatcher.dispatch(inputs["x"], inputs["topk_idx"], inputs["weights"], NUM_EXPERTS)
                out = dispatcher.combine(arrival.rows * 3, arrival)
                assert out.requires_grad == bool(wants)
                if wants:
                    out.square().sum().backward()
            grads = {name: inputs[name].grad for name in wants}
            results.append({"rows": arrival.rows, "out": out, "counts": arrival.num_rows_per_expert, **grads})
            if isinstance(looking, Looking):
                assert looking.calls["fusco::dispatch"] == looking.calls["fusco::combine"] == 1
        return {name: difference(tensor.detach(), results[0][name].detach()) for name, tensor in results[1].items()}


def check_tickets(_: dist.ProcessGroup) -> None:
    """A ticket keeps its handle, and so does a view of it; a copy does not."""
    with dispatcher_of(Run(), mesh_of(2, 1)) as dispatcher:
        inputs = _inputs(5, ())
        with Looking():
            arrival = dispatcher.dispatch(inputs["x"], inputs["topk_idx"], inputs["weights"], NUM_EXPERTS)
        rows, ticket = arrival.rows, arrival.ticket.tensor
        assert num_handles() == 1
        view, copy = ticket.detach(), ticket.clone()
        del arrival, ticket
        ops.combine(rows, inputs["weights"], view)
        del view
        assert num_handles() == 0
        with pytest.raises(ValueError, match="is freed: a copy of a ticket does not keep it alive"):
            ops.combine(rows, inputs["weights"], copy)


def check_operations(_: dist.ProcessGroup) -> None:
    """Run PyTorch's checks of operators: schema, fakes, gradients under a compiler."""
    with dispatcher_of(Run(), mesh_of(2, 1)) as dispatcher:
        inputs = _inputs(5, ("x", "weights"))
        dispatched = (
            inputs["x"],
            inputs["topk_idx"],
            inputs["weights"],
            NUM_EXPERTS,
            NUM_EXPERTS // 2,
            dispatcher._key,
        )
        # Under the compiler the ticket is another one, which is expected.
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(ops.dispatch, dispatched, test_utils=checks)
        rows, _, ticket = ops.dispatch(*dispatched)
        torch.library.opcheck(ops.combine, (rows.detach().requires_grad_(), inputs["weights"], ticket))


def verbs_with_contexts_of_torch(_: dist.ProcessGroup) -> Counter[str]:
    """Count the verbs if a layer without FSDP is checkpointed with PyTorch's contexts."""
    with dispatcher_of(Run(), mesh_of(2, 1)) as dispatcher, _block(dispatcher, torch.float32) as block:
        contexts = partial(create_selective_checkpoint_contexts, fsdp.SHUFFLE_OPS)
        results = []
        for how in ({}, {"context_fn": contexts}):
            x = _inputs(6, ("x",))["x"]
            with noting() as calls:
                checkpoint(block, x[None], use_reentrant=False, **how).square().sum().backward()
            results.append(x.grad)
        assert torch.equal(*results)
    return Counter(calls)


def check_misuse_of_selective_checkpointing(_: dist.ProcessGroup) -> None:
    """A second backward pass, and rows changed in place, raise."""
    run = Run(recomputes="selective")
    with parallel(run) as (model, _):
        loss = model(input_ids=torch.zeros(1, SEQUENCE, dtype=torch.int64)).logits.sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="saves shuffles for one backward pass, not for two"):
            loss.backward()
    with parallel(run) as (model, _):
        layer: ExpertParallelLayer = model.model.layers[1].mlp.experts.forward
        with mock.patch.object(type(layer.dispatcher), "combine", _spoil(type(layer.dispatcher).combine)):
            loss = model(input_ids=torch.zeros(1, SEQUENCE, dtype=torch.int64)).logits.sum()
            with pytest.raises(RuntimeError, match="was changed in place and cannot be reused"):
                loss.backward()


def check_caches(_: dist.ProcessGroup, run: Run) -> None:
    """A cache raises where a block would be recomputed, and is accepted elsewhere."""
    ids = torch.zeros(1, SEQUENCE, dtype=torch.int64)
    with parallel(run) as (model, _):
        with pytest.raises(ValueError, match="call the model with use_cache=False"):
            model(input_ids=ids, use_cache=True)
        model(input_ids=ids, use_cache=False).logits.sum().backward()
        with torch.no_grad():
            output = model(input_ids=ids, use_cache=True)
        cache = output.cache if hasattr(output, "cache") else output.past_key_values  # before transformers 5.24
        assert cache.get_seq_length() == SEQUENCE


def differences_of_a_compiled_block(_: dist.ProcessGroup) -> list[float]:
    """Return relative differences of gradients of a block compiled as one graph, for batches of two sizes."""
    torch._dynamo.reset()
    with dispatcher_of(Run(), mesh_of(2, 1)) as dispatcher, _block(dispatcher, torch.bfloat16) as block:
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        differences = []
        for num_tokens in (6, 9):
            grads = []
            for function in (block, compiled):
                block.zero_grad()
                x = _inputs(num_tokens, ("x",), torch.bfloat16)["x"]
                function(x[None]).square().sum().backward()
                grads.append([x.grad, *(parameter.grad.clone() for parameter in block.parameters())])
            differences += [difference(ours, theirs) for ours, theirs in zip(*grads, strict=True)]
        gc.collect()
        assert num_handles() == 0
    return differences


def differences_of_a_compiled_model(_: dist.ProcessGroup, run: Run) -> tuple[dict[str, float], list[str]]:
    """As ``differences_of_gradients``, for a compiled model, and why its graph was broken."""
    reference = alone(run.kind, run.nums_sequences)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    captures = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with parallel(run) as (model, mesh), captures:
        loss = step(run, torch.compile(model, backend="aot_eager"), mesh)
        differences = {name: difference(model.get_parameter(name).grad, grad) for name, grad in reference.grads.items()}
    return {"loss": abs(loss / reference.loss - 1), **differences}, list(torch._dynamo.utils.counters["graph_break"])


@contextlib.contextmanager
def _block(dispatcher: fsdp.Dispatcher, dtype: torch.dtype) -> Iterator[nn.Module]:
    """A block with a router and this rank's half of the experts, without FSDP."""
    block = make_model("qwen3").model.layers[0].mlp.to(dtype)
    (experts,) = fsdp.find_experts(block)
    for name, parameter in list(experts.module.named_parameters()):
        half = parameter.detach().chunk(2)[dist.get_rank() % 2].clone()
        experts.module.register_parameter(name, nn.Parameter(half))
    experts.module.forward = ExpertParallelLayer(experts, dispatcher)
    yield block


def _inputs(num_tokens: int, wants: tuple[str, ...], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    inputs = {
        "x": torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype),
        "topk_idx": scores.topk(3).indices,
        "weights": torch.rand(num_tokens, 3, generator=generator),
    }
    for name in wants:
        inputs[name].requires_grad_()
    return inputs


def _spoil(combine: Any) -> Any:
    def spoiling(self, y, arrival):
        arrival.rows.detach().zero_()
        return combine(self, y, arrival)

    return spoiling
