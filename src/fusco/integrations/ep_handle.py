"""The handle that ``ElasticBuffer`` returns of a dispatch, with DeepEP's names of attributes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fusco.integrations.expert_rows import SentRows


@dataclass(frozen=True, eq=False)
class DispatchRequest:
    """What a dispatch was asked for.

    Attributes:
        num_experts: of all ranks together.
        expert_alignment: of the experts' blocks, in rows.
        num_max_tokens_per_rank: as given.
        num_sms: as given; 0 means fusco's default.
        topk_idx: int64 (num_tokens, num_topk), a copy unless ``do_handle_copy`` was false.
    """

    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor


@dataclass(frozen=True, eq=False)
class EPHandle(DispatchRequest):
    """A dispatch; any number of combines and other dispatches along it may use it. Also has the request's attributes.

    Attributes:
        num_expanded_tokens: rows, with padding.
        num_recv_tokens_per_expert_list: rows of each local expert with padding; empty without a wait of the host.
        num_unaligned_recv_tokens_per_expert: without padding, int32 (num_local_experts,) on the device.
        psum_num_recv_tokens_per_expert: the end of each local expert's rows: the start of its block and the number of
            its rows; int32 (num_local_experts,) on the device.
        sent: fusco's own.
        do_expand: true.
    """

    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    sent: SentRows
    do_expand: bool = True

    def __getattr__(self, name: str) -> Any:
        if name in ("num_recv_tokens", "psum_num_recv_tokens_per_scaleup_rank"):
            raise NotImplementedError(f"fusco's expanded layout has no {name}: a token is counted for each expert")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def checked_ep_handle(handle: Any) -> EPHandle:
    """Return a caller's handle; raises ``TypeError`` for another one."""
    if not isinstance(handle, EPHandle):
        raise TypeError(f"this call needs the handle of a dispatch, got {type(handle).__name__}")
    return handle
