"""Helpers of the tests' functions on ranks: communicators, poisoned memory, comparisons bit for bit."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from on_device import OnDevice

import fusco
from comparison import assert_within
from generator import Case, number_of, values
from law import Law
from reference.choose_owners import choose_owners
from scattered_lanes import ScatteredLanes


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Arguments of a communicator, the same on every rank."""

    ranks_per_node: int | None
    num_experts: int = 24
    num_topk: int = 8
    max_tokens: int = 24
    max_bytes_per_token: int = 256
    balancer: str | fusco.Balancer = "lanes"  # as Communicator takes it, or "scattered"
    expert_placement: Any = None
    device: str = "cpu"
    settings: fusco.Settings = field(default_factory=lambda: fusco.Settings(timeout_s=60.0, slice_bytes=1 << 16))

    def open(self, group: dist.ProcessGroup) -> fusco.Communicator:
        """Create the communicator."""
        comm = fusco.Communicator(
            group,
            num_experts=self.num_experts,
            num_topk=self.num_topk,
            max_tokens_per_rank=self.max_tokens,
            max_bytes_per_token=self.max_bytes_per_token,
            expert_placement=self.expert_placement,
            ranks_per_node=self.ranks_per_node,
            balancer=self.balancer_of(group),
            settings=self.settings,
            device=self.device,
        )
        return self.on_device(comm)

    def on_device(self, comm: fusco.Communicator) -> fusco.Communicator:
        """Return a communicator of this device for CPU tensors."""
        return comm if self.device == "cpu" else OnDevice(comm)  # type: ignore[return-value]

    def balancer_of(self, group: dist.ProcessGroup) -> str | fusco.Balancer:
        """Return the balancer, by name or as a function."""
        if self.balancer == "scattered":
            num_nodes = dist.get_world_size(group) // (self.ranks_per_node or 1)
            return ScatteredLanes(self.max_tokens * (num_nodes - 1))
        return self.balancer

    def case(self, kind: str, seed: int, world_size: int, num_topk: int | None = None) -> Case:
        """A routing within the capacity; by default of one to ``num_topk`` experts per token."""
        return Case(
            kind=kind,
            seed=seed,
            world_size=world_size,
            num_experts=self.num_experts,
            num_topk=num_topk or number_of(1, self.num_topk, seed, "topk"),
            max_tokens=self.max_tokens,
        )


def no_op(group: dist.ProcessGroup) -> int:
    """Return the rank: a caller that waits for it knows that the group works."""
    return dist.get_rank(group)


def law_of(comm: fusco.Communicator, case: Case, alignment: int = 1, rows_per_expert: int | None = None) -> Law:
    """Return the specification applied to a case on this communicator; with places, to physical experts."""
    ids, placement = case.world_topk_idx, comm.placement
    if placement.lost_experts:
        ids = [_without_lost(of_rank, placement) for of_rank in ids]
    if placement.has_places:
        ids = choose_owners(ids, placement.physical_to_logical, placement.shares, comm.topology.rank_to_node)
    return Law(ids, placement.physical.expert_to_rank, alignment, rows_per_expert)


def _without_lost(ids: torch.Tensor, placement: fusco.ExpertPlacement) -> torch.Tensor:
    """Return -1 for experts that no rank has; without places, the others are numbered anew."""
    kept = [expert for expert in range(placement.num_experts) if expert not in placement.lost_experts]
    numbers = {expert: expert if placement.has_places else i for i, expert in enumerate(kept)}
    return torch.tensor([[numbers.get(each, -1) for each in row] for row in ids.tolist()]).view_as(ids)


def poison(*outputs: torch.Tensor) -> None:
    """Fill outputs with bytes that are NaN in every floating dtype: the next owner of the memory must overwrite it."""
    for output in outputs:
        output.detach().view(-1).view(torch.uint8).fill_(0xFF)


def poison_recycler(comm: fusco.Communicator, setup: Setup) -> None:
    """Poison as many outputs at once as the communicator recycles."""
    case = setup.case("one expert takes all", 0, comm.topology.world_size)
    x = torch.zeros(case.num_tokens(comm.rank), setup.max_bytes_per_token, dtype=torch.uint8)
    taken = [comm.dispatch(x, case.topk_idx(comm.rank)).rows for _ in range(4)]
    rows = values((len(taken[0]), setup.max_bytes_per_token // 8), torch.float64, "poison")
    taken += [comm.combine(rows, comm.dispatch(x, case.topk_idx(comm.rank)).handle) for _ in range(4)]
    poison(*taken)


def check_combine(
    comm: fusco.Communicator,
    law: Law,
    handle: fusco.Handle,
    weights: Sequence[torch.Tensor] | None,
    y: Sequence[torch.Tensor],
    wire_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Combine ``y[r]`` of all ranks, weighted if ``weights`` are given, and compare with the specification."""
    out = comm.combine(y[comm.rank], handle, weights="topk" if weights else None)
    assert out.dtype == y[comm.rank].dtype
    # Partial sums are sent in the wire dtype between nodes, and on CUDA between ranks, too.
    is_on_cpu = not getattr(comm, "is_on_device", False)
    sums = law.sums(comm.rank, y, weights, comm.topology.rank_to_node if is_on_cpu else law.ranks)
    num_hops = 2 if not is_on_cpu and comm.topology.num_nodes > 1 else 1
    assert_within(out, sums.exact, law.error_bound(sums, out.dtype, wire_dtype, num_hops), "combine")
    return out


def digest(*tensors: torch.Tensor) -> str:
    """Return a digest of the bits of tensors."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def pause_randomly(rank: int, seed: int, longest_ms: int) -> None:
    """Sleep for a random time, or not at all, different on each rank."""
    time.sleep(max(0, number_of(-longest_ms, longest_ms, seed, "pause", rank)) / 1000)
