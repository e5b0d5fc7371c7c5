"""Checks of callers' expert ids: their dtype, shape and values, and the ranks that a token is said to be sent to."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fusco.core.compiled import compiled


def num_topk_of(topk_idx: torch.Tensor, num_tokens: int) -> int:
    """Return k of a caller's ids (num_tokens, k); raises unless they are such integers."""
    if topk_idx.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"topk_idx must be int64, got {topk_idx.dtype}")
    if topk_idx.ndim != 2 or len(topk_idx) != num_tokens:
        raise ValueError(f"topk_idx has shape {tuple(topk_idx.shape)}, but this call needs ({num_tokens}, num_topk)")
    return topk_idx.shape[1]


def require_ranks_of(topk_idx: torch.Tensor, is_token_in_rank: torch.Tensor, num_experts: int) -> None:
    """Raise ``ValueError`` unless all ids are experts or -1, and tokens are in the ranks of their experts.

    Ids are (num_tokens, num_topk), ranks bool (num_tokens, num_ranks). On CUDA the host waits for the device.
    """
    ids, is_in = topk_idx.cpu().long().contiguous().numpy(), is_token_in_rank.cpu().contiguous().numpy()
    num_local = num_experts // is_in.shape[1]
    if (token := int(_first_contradiction(ids, is_in, num_experts, num_local))) < 0:
        return
    for k, expert in enumerate(ids[token].tolist()):
        if not -1 <= expert < num_experts:
            raise ValueError(
                f"topk_idx[{token}, {k}] = {expert} is not an expert: ids go from 0 to {num_experts - 1}, and -1 means "
                f"none"
            )
    of_ids = sorted({expert // num_local for expert in ids[token].tolist() if expert >= 0})
    raise ValueError(
        f"is_token_in_rank[{token}] is true for ranks {is_in[token].nonzero()[0].tolist()}, but topk_idx[{token}] = "
        f"{ids[token].tolist()} are experts of ranks {of_ids}, with {num_local} each"
    )


def warm_up_checked_ids() -> None:
    """Compile the check of ids, or load it from the disk cache."""
    _first_contradiction(np.zeros((0, 1), np.int64), np.zeros((0, 1), np.bool_), 1, 1)


@compiled()
def _first_contradiction(topk_idx: Any, is_token_in_rank: Any, num_experts: int, num_local: int) -> int:
    """Return the first token with an id that is none, or with other ranks than its experts'; -1 if there is none."""
    num_ranks = is_token_in_rank.shape[1]
    for token in range(topk_idx.shape[0]):
        for expert in topk_idx[token]:
            if expert < -1 or expert >= num_experts:
                return token
            if expert >= 0 and not is_token_in_rank[token, expert // num_local]:
                return token
        for rank in range(num_ranks):
            if is_token_in_rank[token, rank]:
                has_expert = False
                for expert in topk_idx[token]:
                    has_expert |= expert >= 0 and expert // num_local == rank
                if not has_expert:
                    return token
    return -1
