"""Messages between ranks by torch.distributed: batched isend and irecv, over gloo or NCCL."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def exchange_messages(
    group: dist.ProcessGroup, send: Sequence[tuple[int, torch.Tensor]], receive: Sequence[tuple[int, torch.Tensor]]
) -> None:
    """Send tensors to, and receive them from, the ranks named with them; all at once, and empty ones do not travel.

    Tensors are contiguous, one at most for each peer and direction. On CUDA the messages are ordered on the current
    stream; on the CPU they are complete when this returns. The group must have executed a collective before.
    """
    operations = [
        dist.P2POp(operation, tensor, group=group, group_peer=peer)
        for operation, messages in ((dist.irecv, receive), (dist.isend, send))
        for peer, tensor in messages
        if tensor.numel()
    ]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
