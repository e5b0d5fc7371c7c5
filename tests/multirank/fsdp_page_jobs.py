"""Functions on ranks: the snippets of pages, each after the one before, with what a page takes as given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fsdp_models import make_batch, make_model
from fsdp_runs import Run, dispatcher_of, mesh_of

import fusco
from fusco import fsdp, placement
from fusco.core.config import Launch

NUM_EXPERTS, TOPK, HIDDEN = 4, 2, 16
Scope = dict[str, Any]


def run_snippets(group: dist.ProcessGroup, page: str, snippets: list[str]) -> None:
    """Run the snippets of a page on this rank."""
    with GIVEN[page](group) as scope:
        for snippet in snippets:
            exec(snippet, scope)


@contextlib.contextmanager
def _communicator(group: dist.ProcessGroup, num_spare: int = 0) -> Iterator[Scope]:
    """Yield a communicator, rows and their routing."""
    places = fusco.ExpertPlacement.contiguous(NUM_EXPERTS, 2).in_places(NUM_EXPERTS // 2 + num_spare)
    sizes = {"num_experts": NUM_EXPERTS, "num_topk": TOPK, "max_tokens_per_rank": 64, "hidden": HIDDEN}
    with fusco.Communicator(group, **sizes, dtype=torch.float32, expert_placement=places) as comm:  # type: ignore[arg-type]
        x, weights = torch.randn(8, HIDDEN), torch.rand(8, TOPK)
        ids = torch.stack([torch.randperm(NUM_EXPERTS)[:TOPK] for _ in range(8)])
        given = {"comm": comm, "x": x, "topk_idx": ids, "topk_weights": weights, "fusco": fusco, "torch": torch}
        yield {**given, "fsdp": fsdp, "group": group, "Launch": Launch}


@contextlib.contextmanager
def _balance(group: dist.ProcessGroup) -> Iterator[Scope]:
    """Yield a model, weights of experts in their places, a placement of them, and loads."""
    mesh = mesh_of(2, 1)
    with dispatcher_of(Run(), mesh) as dispatcher, _communicator(group, num_spare=2) as scope:
        placed = np.array([[0, 1], [2, 3]])
        scope |= {"model": make_model("qwen3"), "mesh": mesh, "dispatcher": dispatcher, "Balance": placement.Balance}
        scope |= {name: torch.randn(2, 4, 4) for name in ("w13", "w13_scales", "w2", "w2_scales")}
        scope |= {"loads": [60, 30, 20, 10], "rows_of_experts": [60, 30, 20, 10], "num_ranks": 2, "places_per_rank": 2}
        scope |= {"placed": placed, "weights": [scope["w13"]], "serving": _Serving(scope)}
        scope |= {"trained": placed, "served": placed[::-1].copy(), "targets_or_none": None}
        scope |= {"weights_or_none": [scope["w13"]]}
        yield scope


class _Serving:
    """True while the move of experts goes on."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def __bool__(self) -> bool:
        return not self._scope["task"].is_done


@contextlib.contextmanager
def _faults(group: dist.ProcessGroup) -> Iterator[Scope]:
    """Yield batches, a step that serves them, and a graph."""
    with _communicator(group) as scope:
        batches = iter([("first",), ("second",)])

        def serve(comm: fusco.Communicator, _: tuple[str]) -> None:
            sent = comm.dispatch(scope["x"], scope["topk_idx"], scope["topk_weights"])
            comm.combine(sent.rows, sent.handle)

        scope |= {"next_batch": lambda: next(batches, None), "serve": serve}
        yield scope | {"graph": SimpleNamespace(replay=lambda: None), "out": scope["x"]}


@contextlib.contextmanager
def _static(group: dist.ProcessGroup) -> Iterator[Scope]:
    """Yield experts that take masked rows."""
    with _communicator(group) as scope:
        yield scope | {"masked_experts": lambda rows, _: rows}


@contextlib.contextmanager
def _offload(_: dist.ProcessGroup) -> Iterator[Scope]:
    """Yield a model whose output has a loss."""
    layer = torch.nn.Linear(512, 512)
    yield {
        "fusco": fusco,
        "batch": torch.randn(4, 512),
        "model": lambda batch: SimpleNamespace(loss=layer(batch).sum()),
    }


@contextlib.contextmanager
def _training(_: dist.ProcessGroup) -> Iterator[Scope]:
    """Yield a model and batches."""
    batches = [make_batch(dist.get_rank(), 2, step) for step in range(2)]
    scope = {"torch": torch, "model": make_model("qwen3"), "cross_entropy": torch.nn.functional.cross_entropy}
    yield scope | {"batches": [(each.ids, each.labels) for each in batches]}


@contextlib.contextmanager
def _nothing(_: dist.ProcessGroup) -> Iterator[Scope]:
    yield {}


GIVEN = {
    "docs/balance.md": _balance,
    "docs/coming_from.md": _static,
    "docs/extending.md": _nothing,
    "docs/faults.md": _faults,
    "docs/fsdp.md": _training,
    "docs/offload.md": _offload,
}
