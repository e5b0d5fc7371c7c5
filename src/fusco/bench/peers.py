"""Other libraries that the benchmark measures if they are installed. fusco neither needs nor installs them."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Any

import torch
import torch.distributed as dist

from fusco.bench.traffic import Workload
from fusco.bench.variants import Shuffle


def import_peers(
    group: dist.ProcessGroup,
    workload: Workload,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
) -> dict[str, Shuffle]:
    """Return the installed ones by name; one that cannot be set up is left out, with a warning."""
    if importlib.util.find_spec("deep_ep") is None:
        return {}
    try:
        return {"deep_ep": _deep_ep(group, workload, x, topk_idx, topk_weights)}
    except Exception as error:  # noqa: BLE001  another library may raise anything
        warnings.warn(f"deep_ep is installed but could not be set up, and is left out: {error}", stacklevel=2)
        return {}


def _deep_ep(
    group: dist.ProcessGroup,
    workload: Workload,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
) -> Shuffle:
    """DeepEP's normal kernels within a node (its ``Buffer`` of version 1), and ``index_select`` to expert-major order.

    Weights are applied to expert-major rows, since its combine adds rows without weights.
    """
    deep_ep = importlib.import_module("deep_ep")
    buffer = deep_ep.Buffer(group, int(1e9), 0)
    num_experts = workload.placement.num_experts
    ids = topk_idx.to(deep_ep.topk_idx_t if hasattr(deep_ep, "topk_idx_t") else torch.int64)

    def dispatch() -> tuple[torch.Tensor, list[int], Any]:
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, num_experts)
        rows, local_ids, weights, counts, handle, _ = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=topk_weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
        )
        row, k = (local_ids >= 0).nonzero(as_tuple=True)
        order = local_ids[row, k].argsort(stable=True)
        row, k = row[order], k[order]
        return rows.index_select(0, row), counts, (handle, row, weights[row, k], len(rows))

    def combine(y: torch.Tensor, state: Any) -> torch.Tensor:
        handle, row, weights, num_rows = state
        sums = torch.zeros(num_rows, y.shape[1], dtype=torch.float32, device=y.device)
        sums.index_add_(0, row, y.float() * weights[:, None])
        out: torch.Tensor = buffer.combine(sums.to(y.dtype), handle)[0]
        return out

    return Shuffle(dispatch, combine)
