"""The handle that ``ElasticBuffer`` returns of a dispatch, with DeepEP's names of attributes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fusco.integrations.expert_rows import SentRows


@dataclass(frozen=True, eq=False)
class DispatchSizes:
    """Sizes and routing that a dispatch was asked for."""

    num_experts: int  # of all ranks together
    expert_alignment: int  # of the experts' blocks, in rows
    num_max_tokens_per_rank: int  # as given
    num_sms: int  # as given; 0 means fusco's default
    topk_idx: torch.Tensor  # int64 (num_tokens, num_topk), a copy unless ``do_handle_copy`` was false


@dataclass(frozen=True, eq=False)
class EPHandle(DispatchSizes):
    """A dispatch; any number of combines and other dispatches along it may use it."""

    num_expanded_tokens: int  # rows, with padding
    # rows of each local expert with padding; empty without a wait of the host
    num_recv_tokens_per_expert_list: list[int]
    num_unaligned_recv_tokens_per_expert: torch.Tensor  # without padding, int32 (num_local_experts,) on the device
    # the end of each local expert's rows: the start of its block and the number of its rows; int32
    # (num_local_experts,) on the device
    psum_num_recv_tokens_per_expert: torch.Tensor
    sent: SentRows  # fusco's own
    do_expand: bool = True

    def __getattr__(self, name: str) -> Any:
        if name in ("num_recv_tokens", "psum_num_recv_tokens_per_scaleup_rank"):
            raise NotImplementedError(f"fusco's expanded layout has no {name}: a token is counted for each expert")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
