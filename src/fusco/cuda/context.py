"""The kernels of a communicator: what a rank knows once and for all of each launch, and what launches take in all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusco.core.placement import ExpertPlacement
from fusco.cuda.arena import Arena
from fusco.cuda.device_plan import DevicePlan
from fusco.cuda.kernels.add_returned import add_returned
from fusco.cuda.kernels.combine_rows import combine_rows
from fusco.cuda.kernels.copy_segments import copy_segments
from fusco.cuda.kernels.gather_rows import gather_rows
from fusco.cuda.kernels.held_rows import HeldRows
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.kernels.library import Library
from fusco.cuda.kernels.payload import Payload
from fusco.cuda.kernels.plan import PlanTables, PlanTerms, PublishedRouting, plan_slots
from fusco.cuda.kernels.plan_forwarding import plan_forwarding
from fusco.cuda.kernels.scatter_rows import is_staged, scatter_rows
from fusco.cuda.kernels.stage_rows import stage_rows
from fusco.planner.forwarding import DeviceForwarding


class Kernels:
    """Launches the kernels of one rank on the current stream; for each method see the module of its kernel."""

    def __init__(self, library: Library, arena: Arena, placement: ExpertPlacement) -> None:
        self._library, self._comm = library, arena.comm
        self.stream = 0  # the handle of the stream to launch on
        self.num_sms = 0  # multiprocessors that moving rows took at once since ``begin``
        self._staging_sms = 0
        topology, rank, device = arena.layout.topology, arena.rank, library.device
        self._own_node, num_local = topology.rank_to_node[rank], len(placement.rank_to_experts[rank])
        places = zip(topology.rank_to_node, topology.rank_to_local, strict=True)
        rank_to_place = [local if node == self._own_node else -1 for node, local in places]
        self._tables = PlanTables(
            expert_to_local=placement.local_index_table(rank, device)[:-1].int(),
            expert_to_rank=placement.membership_table(rank_to_place, device)[:-1].int(),
            publishers=topology.rank_to_local,  # each rank publishes the routing of its counterparts
            num_local_experts=num_local,
            run_counts=torch.empty(library.num_sms * num_local, dtype=torch.int32, device=device),
            report=arena.report_address,
        )
        self._expert_to_node = placement.membership_table(topology.rank_to_node, device)[:-1].int()

    def begin(self, stream: int) -> None:
        """From now on launch for another call, on a stream given as its handle."""
        self.stream, self.num_sms, self._staging_sms = stream, 0, 0

    def plan(
        self, plan: DevicePlan, published: Sequence[PublishedRouting], terms: PlanTerms, num_sms: int | None
    ) -> None:
        """Exchange routing within the node and fill the plan's tensors."""
        plan_slots(self._on(), self._tables, plan, published, terms, num_sms)

    def stage(
        self, payloads: Sequence[Payload], pools: Sequence[int], num_tokens: int, num_sms: int | None, stream: int
    ) -> None:
        """Copy rows into the pool that peers read."""
        self._staging_sms = stage_rows(self._on(stream), payloads, pools, num_tokens, num_sms)
        self._take(self._staging_sms)

    def scatter(
        self,
        plan: DevicePlan,
        held: HeldRows,
        payloads: Sequence[Payload],
        rows: Sequence[Sequence[int]],
        *,
        in_place_ranks: int,
        clears_padding: bool,
        num_sms: int | None,
    ) -> None:
        """Pull rows into their slots."""
        taken = scatter_rows(
            self._on(),
            plan,
            held,
            payloads,
            rows,
            in_place_ranks=in_place_ranks,
            clears_padding=clears_padding,
            num_sms=num_sms,
        )
        self._take(taken + self._staging_sms if is_staged(self._on(), in_place_ranks) else taken)

    def combine(
        self,
        held: HeldRows,
        rows: torch.Tensor,
        wire_dtype: torch.dtype,
        out: torch.Tensor,
        *,
        is_weighted: bool,
        num_sms: int | None,
    ) -> None:
        """Sum expert-major rows into the rows that their holders have."""
        self._take(combine_rows(self._on(), held, rows, wire_dtype, out, is_weighted=is_weighted, num_sms=num_sms))

    def forwarding(self, topk_idx: torch.Tensor, summary: torch.Tensor) -> DeviceForwarding:
        """Plan what this rank sends to each other node."""
        return plan_forwarding(self._on(), topk_idx, self._expert_to_node, self._own_node, summary)

    def gather(self, rows: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: int) -> None:
        """Pack rows into messages."""
        gather_rows(self._on(stream), rows, parts)

    def add_returned(
        self, own: torch.Tensor, returned: Sequence[torch.Tensor], places: Sequence[torch.Tensor], out: torch.Tensor
    ) -> None:
        """Add what other nodes returned to the sums of the own one."""
        add_returned(self._on(), own, returned, places, out)

    def copy_segments(
        self,
        src: torch.Tensor,
        src_offset: torch.Tensor,
        dst: torch.Tensor,
        dst_offset: torch.Tensor,
        num_bytes: torch.Tensor,
    ) -> None:
        """Copy scattered segments of memory."""
        copy_segments(self._on(), src, src_offset, dst, dst_offset, num_bytes)

    def _on(self, stream: int | None = None) -> Launcher:
        return Launcher(self._library, self._comm, self.stream if stream is None else stream)

    def _take(self, num_sms: int) -> None:
        """Count multiprocessors that are at work at once."""
        self.num_sms = max(self.num_sms, num_sms)
