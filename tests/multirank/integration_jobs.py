"""Functions on ranks: frameworks' calls to all buffers of ``deep_ep``, whatever happens around them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hybrid_ep_jobs import open_hybrid
from integration_cases import HIDDEN, NUM_LOCAL

from fusco import PeerFailureError
from fusco.integrations.deep_ep.buffer import Buffer
from fusco.integrations.deep_ep.ep_buffer import ElasticBuffer
from fusco.integrations.deep_ep.hybrid_ep_buffer import HybridEPBuffer


def leave_open(group: dist.ProcessGroup) -> None:
    """Use buffers that nothing closes, as frameworks do, and let the process end."""
    x, ids = torch.ones(2, HIDDEN), torch.zeros(2, 1, dtype=torch.int64)
    hybrid, elastic = open_hybrid(group, group.size()), ElasticBuffer(group)
    hybrid.dispatch_with_permute(hidden=x, topk_idx=ids)
    elastic.dispatch(x, topk_idx=ids, num_experts=group.size(), do_expand=True)
    _LEFT_OPEN.extend([hybrid, elastic])


_LEFT_OPEN: list[object] = []


def under_default_device(group: dist.ProcessGroup) -> None:
    """Models are built under a default device of "meta", and run in bfloat16 by default."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            run_hybrid_ep(group)
    finally:
        torch.set_default_dtype(dtype)


def run_hybrid_ep(group: dist.ProcessGroup) -> None:
    """One layer with identity for experts, on tensors that name their device."""
    ids = torch.tensor([[0, NUM_LOCAL * group.size() - 1]], device="cpu")
    x = torch.full((1, HIDDEN), float(group.rank()), dtype=torch.float32, device="cpu")
    made = (open_hybrid(group, group.size()), Buffer(group), ElasticBuffer(group))
    for buffer, call in zip(made, (_through_hybrid_ep, _through_deep_ep, _through_elastic), strict=True):
        torch.testing.assert_close(call(buffer, x, ids), 2 * x)


def _through_hybrid_ep(buffer: HybridEPBuffer, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    probs = torch.ones(1, NUM_LOCAL * buffer.group_size, device="cpu")
    rows, row_probs, *_, handle = buffer.dispatch_with_permute(hidden=x, topk_idx=ids, probs=probs)
    return buffer.combine_with_unpermute(hidden=rows, probs=row_probs, handle=handle)[0]


def _through_deep_ep(buffer: Buffer, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    weights = torch.ones(ids.shape, dtype=torch.float32, device="cpu")
    *_, per_expert, is_in, _ = buffer.get_dispatch_layout(ids, NUM_LOCAL * buffer.group_size)
    rows, _, row_weights, _, handle, _ = buffer.dispatch(
        x, topk_idx=ids, topk_weights=weights, is_token_in_rank=is_in, num_tokens_per_expert=per_expert
    )
    return buffer.combine(rows, handle, row_weights)[0]


def _through_elastic(buffer: ElasticBuffer, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    weights = torch.ones(ids.shape, dtype=torch.float32, device="cpu")
    num_experts = NUM_LOCAL * buffer.num_ranks
    rows, _, _, handle, _ = buffer.dispatch(
        x, topk_idx=ids, topk_weights=weights, num_experts=num_experts, do_expand=True
    )
    return buffer.combine(rows, handle)[0]


def killed_in_a_layer(group: dist.ProcessGroup) -> str:
    """The last rank leaves in the middle of a layer; the others name it."""
    buffer = open_hybrid(group, group.size())
    x, ids = torch.ones(2, HIDDEN), torch.arange(2, dtype=torch.int64)[:, None]
    rows, *_, handle = buffer.dispatch_with_permute(hidden=x, topk_idx=ids)
    if group.rank() == group.size() - 1:
        buffer.destroy()
        return ""
    try:
        buffer.combine_with_unpermute(hidden=rows, handle=handle)
    except PeerFailureError as error:
        return str(error)
    return "no error"
