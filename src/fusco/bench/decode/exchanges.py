"""Ways to move the tokens of a step to experts and back: fusco, DeepEP's low-latency calls, collectives of PyTorch."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fusco.api.communicator import Communicator
from fusco.bench.decode.experts import DecodeExperts, Rows
from fusco.bench.decode.job import DecodeJob
from fusco.bench.prefill.variants import (
    deep_ep_version,
    obstacle_of_deep_ep,
    obstacle_of_transformers,
    transformers_all_to_all,
)
from fusco.bench.shuffle.baseline import BaselineShuffle, weighted_sum
from fusco.core.config import RoutingSizes, Settings, StaticRows
from fusco.core.placement import ExpertPlacement
from fusco.core.rows import row_bytes
from fusco.core.topology import Topology

VARIANTS = {
    "fusco": "static rows for any routing, by expert",
    "fusco-masked": "masked rows for any routing, a fixed number for each expert; products of all of them",
    "fusco-deep_ep": "low-latency calls of fusco's deep_ep module, masked rows, too",
    "deep_ep": "low-latency calls of DeepEP, masked rows, too",
    "allgather": "all-gather of all tokens and reduce-scatter of sums (NCCL or gloo), the default of vLLM",
    "baseline": "all_to_all_single between permutations, the baseline of fusco bench shuffle; the host waits for sizes",
    "transformers": "transformers' own all_to_all expert parallelism; the host waits for sizes",
}
FUSCO = ("fusco", "fusco-masked", "fusco-deep_ep")
EAGER = ("baseline", "transformers")  # whose host waits, so that no CUDA graph has them

# PyTorch 2.13 renamed them.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Sent:
    """Tokens of a micro-batch at their experts."""

    rows: Rows  # expert-major (num_rows, hidden), or masked (num_local_experts, capacity, hidden)
    counts: torch.Tensor  # int64 (num_local_experts,), rows of each expert
    ticket: Any  # what brings results back

    def run(self, experts: DecodeExperts) -> torch.Tensor:
        """Return the experts' results, in the layout of the rows."""
        rows = experts.rows_of(self.rows[0]) if len(self.rows) == 1 else self.rows  # those that travelled unquantised
        return experts.run_masked(rows) if rows[0].ndim == 3 else experts.run(rows, self.counts)


class Exchange(ABC):
    """Moves tokens; dispatch and combine are collectives on the current stream, and hold for two micro-batches."""

    def rows_of(self, experts: DecodeExperts, x: torch.Tensor) -> Rows:
        """Return what travels for tokens (num_tokens, hidden): with FP8 values and scales."""
        return experts.rows_of(x)

    @abstractmethod
    def dispatch(self, rows: Rows, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Sent:
        """Send tokens (num_tokens, ...) to their experts, int64 and float32 (num_tokens, num_topk)."""

    @abstractmethod
    def combine(self, y: torch.Tensor, sent: Sent) -> torch.Tensor:
        """Return the sums of each token's results with its weights, (num_tokens, hidden)."""

    def synchronize(self) -> None:  # noqa: B027  collectives of PyTorch have nothing to tell
        """Wait until everything has arrived; raises if something has not."""


class FuscoExchange(Exchange):
    """fusco's dispatch with a size that any routing fits in, so that the host never waits."""

    def __init__(self, comm: Communicator, static: Callable[[int], StaticRows]) -> None:
        self._comm, self._static = comm, static

    def dispatch(self, rows: Rows, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Sent:
        sent = self._comm.dispatch(rows, topk_idx, topk_weights, static=self._static(len(topk_idx)))
        return Sent(sent.payloads, sent.num_rows_per_expert, sent.handle)

    def combine(self, y: torch.Tensor, sent: Sent) -> torch.Tensor:
        return self._comm.combine(y, sent.ticket)

    def synchronize(self) -> None:
        """Wait, and raise if a rank failed or rows did not fit."""
        self._comm.synchronize()


class LowLatencyExchange(Exchange):
    """DeepEP's low-latency calls, of its own module or of fusco's; rows travel in bfloat16.

    Its FP8 has a scale for each 128 values, which only DeepGEMM's products read. For one scale of each row vLLM moves
    bfloat16, too, and experts quantise what arrives.
    """

    def __init__(self, module: Any, group: dist.ProcessGroup, job: DecodeJob, stack: ExitStack) -> None:
        most, shape = max(job.tokens), job.shape
        kind = module.Buffer
        num_bytes = kind.get_low_latency_rdma_size_hint(most, shape.hidden, job.num_ranks, shape.num_experts)
        self._buffer = kind(
            group, 0, num_bytes, low_latency_mode=True, num_qps_per_rank=job.num_local_experts, explicitly_destroy=True
        )
        stack.callback(self._buffer.destroy)
        self._most, self._num_experts = most, shape.num_experts
        self._id_dtype = getattr(module, "topk_idx_t", torch.int64)

    def rows_of(self, experts: DecodeExperts, x: torch.Tensor) -> Rows:  # noqa: ARG002  of the interface
        """Return the tokens as they are."""
        return (x,)

    def dispatch(self, rows: Rows, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Sent:
        ids = topk_idx.to(self._id_dtype)
        received, counts, handle, _, _ = self._buffer.low_latency_dispatch(
            rows[0], ids, self._most, self._num_experts, use_fp8=False
        )
        return Sent((received,), counts, (ids, topk_weights, handle))

    def combine(self, y: torch.Tensor, sent: Sent) -> torch.Tensor:
        return self._buffer.low_latency_combine(y, *sent.ticket)[0]


class GatherExchange(Exchange):
    """Every rank gets all tokens, computes its experts' part of their sums, and ranks add the parts up."""

    def __init__(self, group: dist.ProcessGroup, job: DecodeJob) -> None:
        self._group, self._num_ranks = group, job.num_ranks
        self._first, self._num_local = group.rank() * job.num_local_experts, job.num_local_experts
        self._edges = torch.arange(job.num_local_experts + 1, dtype=torch.int64, device=job.device)

    def dispatch(self, rows: Rows, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Sent:
        ids, weights, *all_rows = self._gather([topk_idx, topk_weights, *reversed(rows)])
        local = ids.reshape(-1) - self._first
        keys, order = local.where((local >= 0) & (local < self._num_local), self._num_local).sort(stable=True)
        ends = torch.searchsorted(keys, self._edges)
        # Rows of other ranks' experts are the last ones: no product and no sum reads them.
        row_idx = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        is_here = keys.new_empty(len(keys), dtype=torch.bool).scatter_(0, order, keys < self._num_local)
        row_idx = row_idx.where(is_here, -1).view(ids.shape)
        tokens = order // ids.shape[1]
        arrived = tuple(each.view(torch.uint8)[tokens].view(each.dtype) for each in reversed(all_rows))
        return Sent(arrived, ends.diff(), (row_idx, weights))

    def combine(self, y: torch.Tensor, sent: Sent) -> torch.Tensor:
        row_idx, weights = sent.ticket
        sums = weighted_sum(y, row_idx, weights)
        out = sums.new_empty(len(sums) // self._num_ranks, sums.shape[1])
        _REDUCE_SCATTER(out, sums, group=self._group)
        return out

    def _gather(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return all ranks' tensors (num_tokens, width), widest elements first, by one collective of their bytes."""
        sizes = [row_bytes(each) for each in tensors]
        widths = [*sizes, -sum(sizes) % tensors[0].itemsize]  # so that elements are aligned in every row
        padding = torch.zeros(len(tensors[0]), widths[-1], dtype=torch.uint8, device=tensors[0].device)
        packed = torch.cat([*(each.view(torch.uint8) for each in tensors), padding], dim=1)
        whole = packed.new_empty(self._num_ranks * len(packed), packed.shape[1])
        _ALL_GATHER(whole, packed, group=self._group)
        parts = torch.split(whole, widths, dim=1)
        return [part.view(each.dtype) for part, each in zip(parts, tensors, strict=False)]


class BaselineExchange(Exchange):
    """The baseline of ``fusco bench shuffle``; values and scales travel as the bytes of one row."""

    def __init__(self, group: dist.ProcessGroup, job: DecodeJob) -> None:
        placement = ExpertPlacement.contiguous(job.shape.num_experts, job.num_ranks)
        topology = Topology.of_equal_nodes(job.num_ranks, job.ranks_per_node)
        self._shuffle, self._device = BaselineShuffle(group, placement, topology, job.device), job.device

    def dispatch(self, rows: Rows, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Sent:
        sizes = [row_bytes(each) for each in rows]
        packed = rows[0] if len(rows) == 1 else torch.cat([each.view(torch.uint8) for each in rows], dim=1)
        arrived, on_host, handle = self._shuffle.dispatch(packed, topk_idx, topk_weights)
        parts: Rows = (arrived,)
        if len(rows) > 1:
            split = torch.split(arrived, sizes, dim=1)
            parts = tuple(part.contiguous().view(each.dtype) for part, each in zip(split, rows, strict=True))
        return Sent(parts, torch.tensor(on_host, dtype=torch.int64, device="cpu").to(self._device), handle)

    def combine(self, y: torch.Tensor, sent: Sent) -> torch.Tensor:
        return self._shuffle.combine(y, sent.ticket)


class TransformersExchange(Exchange):
    """The two halves of transformers' all_to_all expert parallelism, which moves tokens unquantised, by source rank."""

    def __init__(self, job: DecodeJob) -> None:
        mesh = dist.device_mesh.init_device_mesh(job.device, (job.num_ranks, 1), mesh_dim_names=("ep", "tp"))
        experts = torch.nn.Module()
        experts.num_experts = job.num_local_experts  # type: ignore[assignment]  # transformers' own says so, too
        self._all_to_all = transformers_all_to_all()(experts, mesh["ep"], mesh["tp"])
        self._num_local = job.num_local_experts

    def rows_of(self, experts: DecodeExperts, x: torch.Tensor) -> Rows:  # noqa: ARG002  of the interface
        """Return the tokens as they are."""
        return (x,)

    def dispatch(self, rows: Rows, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Sent:
        arrived, ids, _, state = self._all_to_all._dispatch_tokens(rows[0], topk_idx, topk_weights)  # noqa: SLF001
        by_expert, order = ids.flatten().sort(stable=True)
        return Sent((arrived[order],), by_expert.bincount(minlength=self._num_local), (order, state))

    def combine(self, y: torch.Tensor, sent: Sent) -> torch.Tensor:
        order, state = sent.ticket
        of_sources = torch.empty_like(y).index_copy_(0, order, y)
        out: torch.Tensor = self._all_to_all._combine_tokens(of_sources, state)  # noqa: SLF001  as it calls it
        return out.to(y.dtype)


def obstacle(variant: str, device: str, dtype: str) -> str:
    """Return why a variant cannot run here; empty if it can."""
    if variant == "transformers":
        return obstacle_of_transformers()
    if variant in ("deep_ep", "fusco-deep_ep") and dtype == "float32":
        return "its low-latency rows are bfloat16"
    return _obstacle_of_deep_ep(device) if variant == "deep_ep" else ""


def _obstacle_of_deep_ep(device: str) -> str:
    if found := "DeepEP needs GPUs" if device == "cpu" else obstacle_of_deep_ep(device):
        return found
    if "fusco" in (version := deep_ep_version()):
        return f"deep_ep {version} is fusco's"
    return "" if hasattr(importlib.import_module("deep_ep"), "Buffer") else f"deep_ep {version} has no Buffer"


def make_exchange(name: str, job: DecodeJob, group: dist.ProcessGroup, stack: ExitStack) -> Exchange:
    """Return the variant of this name; a collective. ``stack`` closes it."""
    if name == "allgather":
        return GatherExchange(group, job)
    if name == "baseline":
        return BaselineExchange(group, job)
    if name == "transformers":
        return TransformersExchange(job)
    if name == "deep_ep":
        return LowLatencyExchange(importlib.import_module("deep_ep"), group, job, stack)
    if name == "fusco-deep_ep":
        return LowLatencyExchange(importlib.import_module("fusco.integrations.path.deep_ep"), group, job, stack)
    comm = Communicator(
        group,
        num_experts=job.shape.num_experts,
        num_topk=job.shape.num_topk,
        max_tokens_per_rank=max(job.tokens),
        max_bytes_per_token=job.shape.hidden * (4 if job.dtype == "float32" else 2) + 4,
        ranks_per_node=job.ranks_per_node,
        settings=Settings(timeout_s=job.timeout_s),
        device=job.device,
    )
    return FuscoExchange(stack.enter_context(comm), _static_rows(name, job))


def _static_rows(name: str, job: DecodeJob) -> Callable[[int], StaticRows]:
    """Return what makes static rows that any routing of so many tokens on each rank fits in."""
    choose = StaticRows.for_expert_load if name == "fusco-masked" else StaticRows.for_rank_load
    return lambda num_tokens: choose(
        RoutingSizes(
            max_tokens_per_rank=num_tokens,
            world_size=job.num_ranks,
            num_topk=job.shape.num_topk,
            num_experts=job.shape.num_experts,
        )
    )
