"""A scheme of one's own in `fusco bench shuffle`: each rank sends to its peers one after the other, in a ring.

    PYTHONPATH=examples fusco bench shuffle --variants fusco,baseline,own_scheme:Ring

The benchmark makes it on each rank from the group, the placement of experts, the nodes and the device; it verifies the
rows bit for bit and the sums within rounding, and then measures both.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fusco import ExpertPlacement, Topology


class Ring:
    """Dispatch and combine by permutations and world_size - 1 exchanges with one peer each."""

    def __init__(
        self, group: dist.ProcessGroup, placement: ExpertPlacement, topology: Topology, device: torch.device
    ) -> None:
        self.group, self.size, self.device = group, topology.world_size, device
        self.rank = dist.get_rank(group)
        order = [expert for experts in placement.rank_to_experts for expert in experts]
        self.position = torch.tensor(order, device=device).argsort()  # of an expert among those of all ranks, in order
        self.num_local = [len(experts) for experts in placement.rank_to_experts]

    def dispatch(self, x, topk_idx, topk_weights):
        """Return rows in order of (local expert, source rank, token, k), rows of each expert, and any handle."""
        position = self.position[topk_idx].masked_fill(topk_idx < 0, len(self.position))
        by_position = position.flatten().argsort(stable=True)[: (topk_idx >= 0).sum()]
        counts = torch.bincount(position.flatten(), minlength=len(self.position) + 1)[:-1]
        sent = list(counts.split(self.num_local))  # of each rank's experts
        received = self._exchange(sent, [(self.num_local[self.rank],)] * self.size)
        sizes = [int(each.sum()) for each in sent], [int(each.sum()) for each in received]
        parts = x[by_position // topk_idx.shape[1]].split(sizes[0])
        arrived = torch.cat(self._exchange(parts, [(size, *x.shape[1:]) for size in sizes[1]]))
        experts = torch.arange(self.num_local[self.rank], device=self.device)
        by_expert = torch.cat([experts.repeat_interleave(each) for each in received]).argsort(stable=True)
        handle = (by_position, by_expert, sizes, topk_idx.shape, topk_weights)
        return arrived[by_expert], torch.stack(received).sum(0), handle

    def combine(self, rows, handle):
        """Return the sums of rows times weights, in the order of tokens."""
        by_position, by_expert, (sent, received), shape, topk_weights = handle
        arrived = torch.empty_like(rows)
        arrived[by_expert] = rows
        parts = self._exchange(arrived.split(received), [(size, rows.shape[1]) for size in sent])
        pairs = torch.zeros((shape.numel(), rows.shape[1]), dtype=rows.dtype, device=self.device)
        pairs[by_position] = torch.cat(parts)
        return (pairs.view(*shape, -1).float() * topk_weights[..., None]).sum(1).to(rows.dtype)

    def _exchange(self, parts, shapes):
        """Return what each rank sends to this one, of these shapes; part i of ``parts`` is for rank i."""
        received = [
            torch.empty(shape, dtype=part.dtype, device=self.device) for part, shape in zip(parts, shapes, strict=True)
        ]
        received[self.rank].copy_(parts[self.rank])
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            sending = dist.isend(parts[to].contiguous(), group=self.group, group_dst=to)
            dist.recv(received[source], group=self.group, group_src=source)
            sending.wait()
        return received
