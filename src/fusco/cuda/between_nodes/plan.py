"""Plan of a dispatch between nodes: per token on the device; per rank, node and slice on the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fusco.cuda.kernels.held_rows import HeldRows
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
    # a weak reference to the repeated dispatch that has made it, and what that has allocated for a repeated combine
    made_by: Callable[[], Any] | None = field(default=None, init=False, repr=False, compare=False)
    allocated: tuple[object, tuple[torch.Tensor, torch.Tensor] | None] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    _slices: dict[int, list[HeldRows]] = field(default_factory=dict)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors that it holds on the device, including copies made for earlier calls."""
        copied = itertools.chain.from_iterable(self._slices.values())
        copies = [tensor for held in copied for tensor in held.tensors]
        return [*super().tensors, self.forwarding.memory, *copies]

    @property
    def own_rows(self) -> HeldRows:
        """Rows of this node's ranks."""
        return self.kept(self._slices, _OWN, self._find_own_rows)[0]

    def _find_own_rows(self) -> list[HeldRows]:
        node_ranks = self.traffic.node_ranks
        runs = [[(rank, 0, self.num_rows_of(rank))] for rank in node_ranks]
        return [self.rows_of(runs, node_ranks.index(self.rank))]

    @property
    def known_slices(self) -> list[list[HeldRows]]:
        """Results of ``slices`` so far, one for each number of rows in a slice."""
        return [slices for rows_per_slice, slices in self._slices.items() if rows_per_slice != _OWN]

    def slices(self, rows_per_slice: int) -> list[HeldRows]:
        """Return the rows of other nodes' ranks, by slice."""
        return self.kept(self._slices, rows_per_slice, lambda: self._find_slices(rows_per_slice))

    def _find_slices(self, rows_per_slice: int) -> list[HeldRows]:
        traffic, node_ranks = self.traffic, self.traffic.node_ranks
        return [
            self.rows_of(
                [
                    [(piece.src, piece.first, piece.end) for piece in traffic.receives(rank, number, rows_per_slice)]
                    for rank in node_ranks
                ],
                node_ranks.index(self.rank),
            )
            for number in range(traffic.num_slices(rows_per_slice))
        ]
