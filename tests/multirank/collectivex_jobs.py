"""Functions on ranks: fusco's backend of CollectiveX, judged by the referee's own oracle or by one of its contract."""

# ruff: noqa: PLC0415  the referee may not be installed

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from frozen_frameworks import frozen

import fusco
from comparison import largest_error

NUM_EXPERTS, NUM_TOPK, HIDDEN, NUM_TOKENS = 8, 3, 256, 24
_BITS = 16  # of a token's number, the signs of its first values


def backend_module() -> ModuleType:
    """Return the module of the backend, which subclasses one of the referee's."""
    with mock.patch.object(sys, "path", [str(Path(__file__).parents[2] / "tools"), *sys.path]):
        return importlib.import_module("collectivex_backend")


def options(mode: str, precision: str, ranks_per_node: int) -> SimpleNamespace:
    """The arguments that a backend reads."""
    sizes = {"experts": NUM_EXPERTS, "topk": NUM_TOPK, "hidden": HIDDEN}
    return SimpleNamespace(mode=mode, precision=precision, scale_up_domain=ranks_per_node, **sizes)


def rows_of(tokens: torch.Tensor) -> torch.Tensor:
    """Bfloat16 rows of tokens, whose first values have the bits of their numbers."""
    values = (tokens[:, None] * 131 + torch.arange(HIDDEN) * 17) % 257 - 128
    values[:, :_BITS] = ((tokens[:, None] >> torch.arange(_BITS)) & 1) * 128 - 64
    return (values / 64).to(torch.bfloat16)


def judged(group: dist.ProcessGroup, mode: str, precision: str, ranks_per_node: int) -> dict[str, float]:
    """Return errors of what the backend shows and sums, relative to values of about one."""
    rank, num_ranks = group.rank(), group.size()
    random = torch.Generator().manual_seed(3)
    ids = torch.rand(num_ranks * NUM_TOKENS, NUM_EXPERTS, generator=random).topk(NUM_TOPK).indices
    weights = torch.rand(ids.shape, generator=random).softmax(1)
    x, mine = rows_of(torch.arange(len(ids))), slice(rank * NUM_TOKENS, (rank + 1) * NUM_TOKENS)
    with frozen(group):
        module = backend_module()
        with mock.patch.object(module, "Communicator", partial(fusco.Communicator, group)):
            args, device = options(mode, precision, ranks_per_node), torch.device("cpu")
            backend = module.FuscoBackend(args, rank, num_ranks, rank, device)
            backend.create_buffer(SimpleNamespace(max_tokens_per_rank=NUM_TOKENS))
        seen, sums = backend.semantic_payload(x), None
        problem = SimpleNamespace(dispatch_x=x[mine], topk_idx=ids[mine], topk_weights=weights[mine])
        for _ in range(2):
            handle = backend.dispatch(problem)
            view = backend.inspect_dispatch(problem, handle)
            errors = _errors_of(view, rank, num_ranks, ids, weights, seen)
            errors["tokens"] = abs(backend.recv_tokens(handle) - len(view.payload))
            of_rows = _factors(view, mode)
            out = backend.combine_transformed(problem, handle, (view.payload.float() * of_rows).to(torch.bfloat16))
            expected = seen[mine].float() * (weights[mine] * (ids[mine] + 1)).sum(1, keepdim=True)
            errors["sums"] = largest_error(out, expected)
            backend.stage(problem, handle)
            again = backend.combine(problem, handle)
            factor = 1 if mode == "low-latency" else NUM_TOPK  # of weighted sums of equal rows, and of plain ones
            errors["staged"] = largest_error(again, factor * seen[mine].float())
            assert sums is None or torch.equal(sums, again), "two calls differ"
            sums = again
        assert backend.finalize(0) == 0
    return errors


def _factors(view: Any, mode: str) -> torch.Tensor:
    """What experts do to a row, float32 (num_rows, 1): times one more than their numbers, and weights if they apply."""
    if mode == "low-latency":
        return view.expert_ids[:, None].float() + 1
    return (view.weights * (view.expert_ids + 1)).sum(1, keepdim=True)


def _errors_of(
    view: Any, rank: int, num_ranks: int, ids: torch.Tensor, weights: torch.Tensor, seen: torch.Tensor
) -> dict[str, float]:
    """Return how many tokens, rows and numbers of the view are wrong."""
    tokens = ((view.payload[:, :_BITS] > 0).long() << torch.arange(_BITS)).sum(1)
    is_here = ids // (NUM_EXPERTS // num_ranks) == rank
    counts = torch.bincount(ids[is_here], minlength=NUM_EXPERTS).view(num_ranks, -1)[rank]
    errors = {
        "payload": float((view.payload != seen[tokens]).sum()),
        "counts": float((view.local_expert_counts != counts).sum()),
    }
    if view.expert_ids.ndim == 1:
        pairs = sorted(zip(tokens.tolist(), view.expert_ids.tolist(), strict=True))
        expected = [(token, expert) for token, k in is_here.nonzero().tolist() for expert in [int(ids[token, k])]]
        return {**errors, "experts": float(pairs != sorted(expected))}
    order = torch.where(is_here, ids, NUM_EXPERTS).argsort(1)
    masked = torch.where(is_here, ids, -1).gather(1, order)
    shown = torch.where(is_here, weights, 0.0).gather(1, order)
    is_one = sorted(tokens.tolist()) == is_here.any(1).nonzero()[:, 0].tolist()
    errors |= {"experts": float((view.expert_ids != masked[tokens]).sum()), "once": float(not is_one)}
    return {**errors, "weights": float((view.weights != shown[tokens]).sum())}


def oracle_reports(group: dist.ProcessGroup, device: str, mode: str, precision: str, ranks_per_node: int) -> list[dict]:
    """Return what the referee's oracle says of a few numbers of tokens."""
    import ep_harness
    import routing

    rank, num_ranks, num_experts = group.rank(), group.size(), 32
    args = SimpleNamespace(
        **{**vars(options(mode, precision, ranks_per_node)), "experts": num_experts, "topk": 8},
        tokens_ladder="1 5 32",
        routing="uniform",
        seed=67,
        phase="decode",
    )
    place = torch.device("cpu") if device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    backend, reports = backend_module().FuscoBackend(args, rank, num_ranks, rank, place), []
    spec = backend.make_inputs(args)
    backend.create_buffer(spec)
    nothing = {} if device == "cuda" else {"synchronize": lambda: None}
    with mock.patch.multiple(torch.cuda, **nothing) if nothing else mock.patch.dict({}):
        for tokens, point in spec.points.items():
            ids, weights = point.topk_idx.to(place), point.topk_weights.to(place)
            problem = backend.make_problem(tokens, ids, weights, point.activations)
            backend.warm(problem, 2)
            sizes = num_experts // num_ranks, ranks_per_node, args.seed
            traces = point.global_idx, point.global_weights, rank
            reports.append(ep_harness._run_expert_oracle(torch, routing, backend, problem, *traces, *sizes))
    backend._comm.close()
    return reports
