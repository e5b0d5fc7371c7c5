"""The variants for DeepEP against a replacement that has the interfaces of 1.2.1 and 2.1, on two ranks.

It has their parameters, names and results, written from their documentation. The library itself needs GPUs.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from types import ModuleType
from typing import Any

import pytest
import torch
from workloads import workload

from fusco import Settings
from fusco.bench.inputs.traffic import WorldInput
from fusco.bench.shuffle.factory import ShuffleFactory
from fusco.bench.shuffle.run import ShuffleRun
from fusco.bench.shuffle.verification import verify
from fusco.integrations.deep_ep import buffer as deep_ep_buffer, ep_buffer as elastic_buffer

NUM_RANKS, NUM_EXPERTS = 2, 6
DESTROYED: list[int] = []  # the ranks whose buffers were destroyed


@dataclass
class Ranks:
    """Two threads that play ranks."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(NUM_RANKS, timeout=10))
    values: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """As much of a process group as the library's constructors are given."""

    index: int
    ranks: Ranks

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return NUM_RANKS

    def all_gather(self, value: Any) -> list[Any]:
        self.ranks.barrier.wait()
        self.ranks.values[self.index] = value
        self.ranks.barrier.wait()
        return [self.ranks.values[rank] for rank in range(NUM_RANKS)]


@dataclass(frozen=True)
class Received:
    """What a rank has received: rows, ids with -1 for other ranks' experts, weights, and (source, token) of each."""

    rows: torch.Tensor
    local_ids: torch.Tensor
    weights: torch.Tensor
    origins: list[tuple[int, int]]


def exchange(group: Group, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Received:
    """A token once for each rank that needs it, in order of source and token."""
    num_local = NUM_EXPERTS // NUM_RANKS
    rows, ids, weights, origins = [], [], [], []
    for src, (x_of, idx_of, weights_of) in enumerate(group.all_gather((x, topk_idx, topk_weights))):
        is_here = (idx_of >= 0) & (idx_of // num_local == group.index)
        for token in is_here.any(1).nonzero().flatten().tolist():
            rows.append(x_of[token])
            ids.append(torch.where(is_here[token], idx_of[token] % num_local, -1))
            weights.append(weights_of[token] * is_here[token])
            origins.append((src, token))
    shape = (len(rows), topk_idx.shape[1])
    return Received(
        torch.stack(rows) if rows else x[:0],
        torch.stack(ids) if ids else topk_idx.new_empty(shape),
        torch.stack(weights) if weights else topk_weights.new_empty(shape),
        origins,
    )


def add_up(group: Group, rows: torch.Tensor, origins: list[tuple[int, int]], num_tokens: int) -> torch.Tensor:
    """Sum the rows of each token of this rank, from all ranks, without weights."""
    out = torch.zeros(num_tokens, rows.shape[1])
    for rows_of, origins_of in group.all_gather((rows, origins)):
        for row, (src, token) in zip(rows_of, origins_of, strict=True):
            if src == group.index:
                out[token] += row.float()
    return out.to(rows.dtype)


def with_parameters_of(interface: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a method the parameters and defaults of the library's, which fusco's own class has, as a test of it says."""
    signature = inspect.signature(interface)

    def make(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            bound = signature.bind(*arguments, **options)
            bound.apply_defaults()
            return method(**bound.arguments)

        return call

    return make


class Buffer:
    """Version 1."""

    num_sms = 20

    @with_parameters_of(deep_ep_buffer.Buffer.__init__)
    def __init__(self, group, num_nvl_bytes, explicitly_destroy, **_):
        assert num_nvl_bytes > 0
        assert explicitly_destroy
        self.group = group

    def destroy(self):
        DESTROYED.append(self.group.index)

    @staticmethod
    def set_num_sms(new_num_sms):
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @with_parameters_of(deep_ep_buffer.Buffer.get_dispatch_layout)
    def get_dispatch_layout(self, topk_idx, num_experts, **_):
        owners = torch.where(topk_idx >= 0, topk_idx // (num_experts // NUM_RANKS), -1)
        is_in_rank = torch.stack([(owners == rank).any(1) for rank in range(NUM_RANKS)], dim=1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return is_in_rank.sum(0).int(), None, per_expert, is_in_rank, None

    @with_parameters_of(deep_ep_buffer.Buffer.dispatch)
    def dispatch(self, x, topk_idx, topk_weights, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, **_):
        assert topk_idx.dtype == torch.int64
        layout = self.get_dispatch_layout(topk_idx, NUM_EXPERTS)
        assert torch.equal(num_tokens_per_rank, layout[0])
        assert torch.equal(num_tokens_per_expert, layout[2])
        assert torch.equal(is_token_in_rank, layout[3])
        received = exchange(self.group, x, topk_idx, topk_weights)
        num_local = NUM_EXPERTS // NUM_RANKS
        counts = torch.bincount(received.local_ids[received.local_ids >= 0], minlength=num_local).tolist()
        handle = (received.origins, len(x))
        return received.rows, received.local_ids, received.weights, counts, handle, None

    @with_parameters_of(deep_ep_buffer.Buffer.combine)
    def combine(self, x, handle, **_):
        origins, num_tokens = handle
        return add_up(self.group, x, origins, num_tokens), None, None


@dataclass
class EPHandle:
    """The attributes of version 2's handle that frameworks read, and where rows come from."""

    num_recv_tokens_per_expert_list: list[int]
    origins: list[tuple[int, int]]
    num_tokens: int


class ElasticBuffer:
    """Version 2."""

    @with_parameters_of(elastic_buffer.ElasticBuffer.__init__)
    def __init__(self, group, num_max_tokens_per_rank, hidden, num_topk, explicitly_destroy, **_):
        assert min(num_max_tokens_per_rank, hidden, num_topk) > 0
        assert explicitly_destroy
        self.group, self.num_max_tokens_per_rank = group, num_max_tokens_per_rank

    def destroy(self):
        DESTROYED.append(self.group.index)

    @with_parameters_of(elastic_buffer.ElasticBuffer.dispatch)
    def dispatch(self, x, topk_idx, topk_weights, num_experts, do_cpu_sync, do_expand, **_):
        assert do_expand
        assert num_experts == NUM_EXPERTS
        assert len(x) <= self.num_max_tokens_per_rank
        received = exchange(self.group, x, topk_idx, topk_weights)
        rows, weights, origins, counts = [], [], [], []
        for expert in range(NUM_EXPERTS // NUM_RANKS):
            pairs = (received.local_ids == expert).nonzero().tolist()
            counts.append(len(pairs))
            for row, k in reversed(pairs):  # in order of arrival, so in any
                rows.append(received.rows[row])
                weights.append(received.weights[row, k])
                origins.append(received.origins[row])
        expanded, of_rows = torch.stack(rows) if rows else x[:0], torch.tensor(weights)
        if not do_cpu_sync:  # rows for all that could arrive, and no counts
            counts, spare = [], NUM_RANKS * self.num_max_tokens_per_rank * topk_idx.shape[1] - len(rows)
            expanded = torch.cat([expanded, x.new_full((spare, x.shape[1]), torch.nan)])
            of_rows = torch.cat([of_rows, torch.full((spare,), torch.nan)])
        return expanded, None, of_rows, EPHandle(counts, origins, len(x)), None

    @with_parameters_of(elastic_buffer.ElasticBuffer.combine)
    def combine(self, x, handle, **_):
        return add_up(self.group, x, handle.origins, handle.num_tokens), None, None


@pytest.fixture
def deep_ep(monkeypatch) -> ModuleType:
    module = ModuleType("deep_ep")
    module.Buffer, module.ElasticBuffer, module.topk_idx_t = Buffer, ElasticBuffer, torch.int64
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    return module


def errors_of(variant: str, pattern: str) -> list[str]:
    """What a variant gets wrong on any rank."""
    load = workload(pattern, 1, NUM_RANKS, NUM_EXPERTS, tokens=19, hidden=24, num_topk=3)
    run = ShuffleRun(workloads=(load,), variants=(variant,), settings=Settings(), balancer="static", num_iterations=1)
    ranks, world = Ranks(), WorldInput.of(load)

    def on_rank(rank: int) -> list[str]:
        with ShuffleFactory(Group(rank, ranks), run) as factory:
            return verify(factory.make(variant, load, world), load, world, rank)

    with ThreadPoolExecutor(NUM_RANKS) as threads:
        return list(chain.from_iterable(threads.map(on_rank, range(NUM_RANKS))))


@pytest.mark.parametrize("pattern", ["uniform", "one-rank", "one-expert"])
@pytest.mark.parametrize("variant", ["deep_ep", "deep_ep_v2", "deep_ep_v2-graph"])
def test_rows_are_expert_major_and_sums_weighted_and_buffers_released(variant, pattern, deep_ep):
    DESTROYED.clear()
    assert errors_of(variant, pattern) == []
    assert sorted(DESTROYED) == [0, 1]


def test_only_rows_of_one_expert_may_be_in_order_of_arrival(deep_ep, monkeypatch):
    dispatch = ElasticBuffer.dispatch

    def shifted(self: ElasticBuffer, *arguments: Any, **options: Any) -> Any:
        rows, *others = dispatch(self, *arguments, **options)
        return rows.roll(1, dims=0), *others

    monkeypatch.setattr(ElasticBuffer, "dispatch", shifted)
    assert any("dispatched rows are wrong" in error for error in errors_of("deep_ep_v2", "uniform"))


def test_version_1_keeps_the_order_of_tokens(deep_ep, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "exchange", lambda *given: in_reverse(exchange_in_order(*given)))
    assert any("dispatched rows are wrong" in error for error in errors_of("deep_ep", "uniform"))


exchange_in_order = exchange


def in_reverse(received: Received) -> Received:
    rows = (getattr(received, name).flip(0) for name in ("rows", "local_ids", "weights"))
    return Received(*rows, received.origins[::-1])
