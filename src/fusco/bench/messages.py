"""Messages between ranks by torch.distributed: batched isend and irecv, over gloo or NCCL."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def exchange_messages(
    group: dist.ProcessGroup, send: Sequence[tuple[int, torch.Tensor]], receive: Sequence[tuple[int, torch.Tensor]]
) -> None:
    """Send tensors to, and receive them from, the ranks named with them; all at once, and empty ones do not travel.

    Tensors are contiguous; several for one destination arrive in their order. On CUDA the messages are ordered on the
    current stream; on the CPU they are complete when this returns. The group must have executed a collective before.
    """
    operations = [
        dist.P2POp(operation, tensor, group=group, group_peer=peer, tag=tag)
        for operation, messages in ((dist.irecv, receive), (dist.isend, send))
        for peer, tensor, tag in _tagged(messages)
        if tensor.numel()
    ]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _tagged(messages: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor, int]]:
    """Number the messages of each peer: the number is the tag, the same on both sides."""
    num_before: dict[int, int] = {}
    tagged = []
    for peer, tensor in messages:
        tag = num_before.get(peer, 0)
        num_before[peer] = tag + 1
        tagged.append((peer, tensor, tag))
    return tagged
