"""Plan of a dispatch between nodes: per token on the device; per rank, node and slice on the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fusco.cuda.kernels.held_rows import HeldRows
from fusco.cuda.kernels.plan import PlannedRows, Runs
from fusco.cuda.kernels.plan_forwarding import ForwardingTensors
from fusco.cuda.within_node.device_plan import DevicePlan
from fusco.planner.internode import InternodeTraffic

_OWN = 0  # in place of the rows per slice


@dataclass(kw_only=True)
class InternodePlan(DevicePlan):
    """A plan between nodes.

    Rows that it returns are kept as ``kept`` says, and shared with plans made of it by ``dataclasses.replace``.
    """

    traffic: InternodeTraffic  # the number of rows from each rank to each node, and the forwarders
    forwarding: ForwardingTensors  # the tokens that this rank sends to other nodes
    num_empty_rows: int = 0  # rows of this rank's messages to other nodes that no token fills, if the host knows it
    # a weak reference to the program that has made it, and what that has allocated for a combine
    made_by: Callable[[], Any] | None = field(default=None, init=False, repr=False, compare=False)
    allocated: tuple[object, list[torch.Tensor] | None] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    _slices: dict[int, list[HeldRows]] = field(default_factory=dict)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors that it holds on the device, including copies made for earlier calls."""
        copied = itertools.chain.from_iterable(self._slices.values())
        copies = [tensor for held in copied for tensor in held.tensors]
        return [*super().tensors, self.forwarding.memory, *copies]

    def replace_weights(self, of_slots: torch.Tensor) -> None:
        """See ``Plan``."""
        super().replace_weights(of_slots)
        self._slices.clear()  # they may have copies of the former ones

    @property
    def own_rows(self) -> HeldRows:
        """Rows of this node's ranks."""
        return self.kept(self._slices, _OWN, self._find_own_rows)[0]

    def _find_own_rows(self) -> list[HeldRows]:
        return [self.rows_of(own_runs(self.traffic, self), self.traffic.local)]

    def slices(self, rows_per_slice: int) -> list[HeldRows]:
        """Return the rows of other nodes' ranks, by slice."""
        return self.kept(self._slices, rows_per_slice, lambda: self._find_slices(rows_per_slice))

    def _find_slices(self, rows_per_slice: int) -> list[HeldRows]:
        traffic = self.traffic
        numbers = range(traffic.num_slices(rows_per_slice))
        return [self.rows_of(runs_of_slice(traffic, number, rows_per_slice), traffic.local) for number in numbers]


def own_runs(traffic: InternodeTraffic, plan: PlannedRows) -> Runs:
    """Return the rows of this node's ranks."""
    return [[(rank, 0, plan.num_rows_of(rank))] for rank in traffic.node_ranks]


def runs_of_slice(traffic: InternodeTraffic, number: int, rows_per_slice: int) -> Runs:
    """Return the rows of a slice that the ranks of this node forward."""
    return [
        [(piece.src, piece.first, piece.end) for piece in traffic.receives(rank, number, rows_per_slice)]
        for rank in traffic.node_ranks
    ]
