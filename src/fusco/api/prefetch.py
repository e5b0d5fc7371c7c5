"""Copies of experts for one batch: from their homes to spare places, and their gradients back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from fusco.api.placement_move import ExpertMemory
from fusco.core.balance import BatchPlan
from fusco.core.lanes import IntArray
from fusco.core.placement import ExpertPlacement
from fusco.core.rows import accumulation_dtype, wants_grad
from fusco.core.topology import Topology
from fusco.placement.moves import MovePlan, as_places, places_of_copies, plan_moves

Arrived = Mapping[int, Sequence[torch.Tensor]]  # bytes by transfer
Shapes = Sequence[tuple[torch.Size, torch.dtype]]


@dataclass(frozen=True, eq=False)
class Copies:
    """The copies of a batch, from the homes of experts to spare places."""

    plan: BatchPlan
    placement: ExpertPlacement
    topology: Topology
    places: IntArray  # (R, spare places), the expert of each, -1 for none
    held: IntArray  # (R, P), the same without copies

    @classmethod
    def of(cls, plan: BatchPlan, placement: ExpertPlacement, topology: Topology, spare_places: int) -> Copies:
        """Check a plan; ``ValueError`` if it is not for this placement, or copies more than there are places."""
        places, held = places_of_copies(plan, topology.world_size, spare_places), as_places(placement)
        for expert, rank in zip(plan.experts.tolist(), plan.ranks.tolist(), strict=True):
            if not 0 <= expert < placement.num_experts:
                raise ValueError(f"the plan copies expert {expert}, but there are {placement.num_experts}")
            if expert in held[rank]:
                raise ValueError(f"the plan copies expert {expert} to rank {rank}, which has it")
        return cls(plan, placement, topology, places, held)

    def moves(self, bytes_per_expert: int) -> MovePlan:
        """Return the transfers to the spare places."""
        return plan_moves(self.held, self.places, bytes_per_expert, self.topology)

    def moves_home(self, bytes_per_expert: int) -> MovePlan:
        """Return the transfers of gradients, one for each copy, to the homes."""
        homes = np.array(self.placement.expert_to_rank)[self.plan.experts]
        return MovePlan(
            self.plan.experts, self.plan.ranks, homes, np.full_like(homes, -1), bytes_per_expert, self.topology
        )

    def held_place(self, expert: int, rank: int) -> int:
        """Return the place of an expert that a rank has without copies."""
        return int(np.flatnonzero(self.held[rank] == expert)[0])

    @cached_property
    def place_of_copy(self) -> list[int]:
        """The spare place of each copy on its rank."""
        pairs = zip(self.plan.ranks.tolist(), self.plan.experts.tolist(), strict=True)
        return [self.places[rank].tolist().index(expert) for rank, expert in pairs]

    def put(self, spares: Sequence[torch.Tensor], moves: MovePlan, arrived: Arrived, rank: int) -> None:
        """Write the experts that have arrived to the spare places of a rank."""
        memory, places = ExpertMemory(spares), self.places[rank].tolist()
        for i, pieces in arrived.items():
            memory.write(places.index(int(moves.experts[i])), pieces)

    def sums(self, shapes: Shapes, moves: MovePlan, arrived: Arrived, like: torch.Tensor) -> list[torch.Tensor]:
        """Return the sums of the gradients that have arrived, of the given shapes and dtypes, where ``like`` is.

        Those of an expert are added in ascending order of rank.
        """
        sums = [like.new_zeros(shape, dtype=accumulation_dtype(dtype)) for shape, dtype in shapes]
        parts = [like.new_empty((1, *shape[1:]), dtype=dtype) for shape, dtype in shapes]
        memory = ExpertMemory(parts)
        for i in sorted(arrived, key=lambda i: int(moves.src_ranks[i])):
            memory.write(0, arrived[i])
            local = self.placement.expert_to_local[int(moves.experts[i])]
            for total, part in zip(sums, parts, strict=True):
                total[local].add_(part[0])
        return [total.to(dtype) for total, (_, dtype) in zip(sums, shapes, strict=True)]


@dataclass(frozen=True)
class Prefetched:
    """Copies that have arrived; wrapped, so that autograd sees new tensors and not views of an input."""

    tensors: tuple[torch.Tensor, ...]


class PrefetchExperts(torch.autograd.Function):
    """Copies of experts from the weights of their homes."""

    @staticmethod
    def forward(
        ctx: Any,
        made: Prefetched,
        way_back: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
        *weights: torch.Tensor,  # noqa: ARG004  for autograd
    ) -> tuple[torch.Tensor, ...]:
        """Record the copies."""
        ctx.way_back = way_back
        needed = ctx.needs_input_grad[2:]
        ctx.mark_non_differentiable(*(each for each, needs in zip(made.tensors, needed, strict=True) if not needs))
        return made.tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of all copies to the homes."""
        needed = ctx.needs_input_grad[2:]
        sums = iter(ctx.way_back([grad for grad, needs in zip(grads, needed, strict=True) if needs]))
        return None, None, *(next(sums) if needs else None for needs in needed)


def with_gradients(
    weights: Sequence[torch.Tensor],
    spares: tuple[torch.Tensor, ...],
    way_back: Callable[[Shapes, Sequence[torch.Tensor]], list[torch.Tensor]],
) -> tuple[torch.Tensor, ...]:
    """Return the copies so that ``way_back`` brings the gradients of those whose weights require them, if any do."""
    shapes = [(weight.shape, weight.dtype) for weight in weights if wants_grad(weight)]
    if not shapes:
        return spares
    return tuple(PrefetchExperts.apply(Prefetched(spares), partial(way_back, shapes), *weights))  # type: ignore[no-untyped-call]
