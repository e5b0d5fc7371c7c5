"""Messages between ranks as torch.distributed has them: batched isend and irecv, over gloo or NCCL."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def exchange_messages(
    group: dist.ProcessGroup,
    send: Sequence[tuple[int, torch.Tensor]],
    receive: Sequence[tuple[int, torch.Tensor]],
) -> None:
    """Send and receive contiguous tensors, all at once; empty ones do not travel.

    On CUDA everything happens on the current stream, on the CPU it has happened when this returns. The group must
    have had a collective before.

    Args:
        group: the ranks.
        send: destination and what goes there; several for one destination arrive in this order.
        receive: source and where what comes from there is written.

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
    """Each message with how many came before it for the same peer: its tag, the same on both sides."""
    num_before: dict[int, int] = {}
    tagged = []
    for peer, tensor in messages:
        tag = num_before.get(peer, 0)
        num_before[peer] = tag + 1
        tagged.append((peer, tensor, tag))
    return tagged
