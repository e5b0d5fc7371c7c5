"""DeepEP, which the benchmark measures if it is installed. fusco neither needs nor installs it.

Both versions return what fusco does: expert-major rows, and sums with weights. Version 1 sends a token to a rank once,
so one sort of its expert ids and one ``index_select`` follow a dispatch, and one pass that gathers and sums the rows of
a token precedes a combine. Version 2 expands rows itself; since its combine adds rows without weights, one pass
multiplies them before. Only interfaces are used: those of deep_ep 1.2.1 (``Buffer``) and 2.1 (``ElasticBuffer``).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fusco.bench.inputs.traffic import Workload
from fusco.bench.shuffle.baseline import weighted_sum
from fusco.core.profile import CallProfile

_NUM_SMS = 64  # of 16, 24, 64 and 128, nearly the fastest on 2 and on 4 H200; its default of 20 is for overlap
_NVLINK_BUFFER_BYTES = 10**9


@dataclass(frozen=True)
class BufferHandle:
    """State of a dispatch through ``Buffer`` that combine needs."""

    of_library: Any  # the library's handle
    # int64 (num_received, num_topk), the expert-major row of each received token's experts here; at least the number of
    # rows for experts that are elsewhere
    row_idx: torch.Tensor
    weights: torch.Tensor  # float32 (num_received, num_topk)


class PeerShuffle(AbstractContextManager[Any]):
    """A buffer of DeepEP, which the end of a ``with`` block releases on all ranks; not after an error on one."""

    profile = CallProfile()  # its calls have none
    _buffer: Any

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self._buffer.destroy()


class BufferShuffle(PeerShuffle):
    """DeepEP's normal kernels within a node (``Buffer``), with a permutation to expert-major order and back."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int, num_sms: int | None) -> None:
        deep_ep = importlib.import_module("deep_ep")
        deep_ep.Buffer.set_num_sms(max(2, (num_sms or _NUM_SMS) // 2 * 2))  # it takes even numbers
        self._buffer = deep_ep.Buffer(group, _NVLINK_BUFFER_BYTES, 0, explicitly_destroy=True)
        self._num_experts, self._num_local = num_experts, num_experts // group.size()
        self._id_dtype = _id_dtype(deep_ep)

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, Sequence[int], BufferHandle]:
        """Return expert-major rows, the rows of each local expert, and a handle."""
        ids = topk_idx.to(self._id_dtype)
        per_rank, _, per_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(ids, self._num_experts)
        received, local_ids, weights, counts, handle, _ = self._buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=topk_weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
        )
        num_rows, flat = sum(counts), local_ids.reshape(-1)
        order = flat.where(flat >= 0, self._num_local).sort(stable=True).indices  # those that are elsewhere last
        row_idx = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        rows = received.index_select(0, order[:num_rows] // local_ids.shape[1])
        return rows, counts, BufferHandle(handle, row_idx.view(local_ids.shape), weights)

    def combine(self, y: torch.Tensor, handle: BufferHandle) -> torch.Tensor:
        """Return token-major rows; parts of a sum travel in the dtype of rows."""
        return self._buffer.combine(weighted_sum(y, handle.row_idx, handle.weights), handle.of_library)[0]


class ElasticBufferShuffle(PeerShuffle):
    """DeepEP's ``ElasticBuffer`` with expanded rows: by expert, those of an expert in order of arrival."""

    def __init__(self, group: dist.ProcessGroup, workload: Workload, num_sms: int | None) -> None:
        os.environ.setdefault("EP_DISABLE_GIN", "1")  # ranks of a node need no network, and it may not be there
        deep_ep = importlib.import_module("deep_ep")
        self._buffer = deep_ep.ElasticBuffer(
            group,
            num_max_tokens_per_rank=workload.tokens,
            hidden=workload.hidden,
            num_topk=workload.num_topk,
            explicitly_destroy=True,
        )
        self._num_experts, self._num_sms = workload.placement.num_experts, num_sms or _NUM_SMS
        self._id_dtype = _id_dtype(deep_ep)

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, counts: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, Sequence[int], Any]:
        """Return expert-major rows, the rows of each local expert, and a handle.

        With ``counts``, those of an equal dispatch before, nothing waits for the host and a graph can capture it.
        """
        rows, _, weights, handle, _ = self._buffer.dispatch(
            x,
            topk_idx=topk_idx.to(self._id_dtype),
            topk_weights=topk_weights,
            num_experts=self._num_experts,
            num_sms=self._num_sms,
            do_cpu_sync=counts is None,
            do_expand=True,
        )
        counts = handle.num_recv_tokens_per_expert_list if counts is None else counts
        num_rows = sum(counts)  # without a wait for the host there is room for as many as can arrive
        return rows[:num_rows], counts, (handle, weights[:num_rows])

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        """Return token-major rows; products with weights and parts of a sum are rounded to the dtype of rows."""
        handle, weights = state
        weighted = weighted_sum(y, torch.arange(len(y), device=y.device)[:, None], weights.view(-1, 1))
        return self._buffer.combine(weighted, handle)[0]


def _id_dtype(deep_ep: Any) -> torch.dtype:
    return getattr(deep_ep, "topk_idx_t", torch.int64)
