"""Context of all launches of one rank: arena, kernels, tables, watchdog, and timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fusco.control.watchdog import Watchdog
from fusco.core.placement import ExpertPlacement
from fusco.core.recent import Recent
from fusco.core.timeline import NO_TIMELINE, NoTimeline, Timeline
from fusco.core.topology import Topology
from fusco.core.wire import Wire
from fusco.cuda.gpu import Gpu
from fusco.cuda.kernels.abi import pinned
from fusco.cuda.kernels.launcher import KernelCall, Launcher, PreparedLaunch
from fusco.cuda.kernels.library import Library
from fusco.cuda.kernels.plan import PlanTables
from fusco.cuda.kernels.program import Program, TimedProgram
from fusco.cuda.kernels.share_counts import shared_count_bytes
from fusco.cuda.memory.arena import Arena
from fusco.cuda.memory.layout import DeviceLayout
from fusco.planner.routing import describe_invalid_id, logical_id


@dataclass(kw_only=True)
class CudaContext:
    """One rank's device, with its per-rank constants."""

    arena: Arena  # the peer-visible memory
    library: Library  # the device's kernels
    placement: ExpertPlacement  # the physical experts of each rank
    num_experts: int  # that a caller may name
    watchdog: Watchdog  # waits for peers
    tables: PlanTables  # tables for all plans
    expert_to_node: torch.Tensor  # int32 (num_experts,)
    timeline: Timeline | NoTimeline = NO_TIMELINE  # of all further launches
    _prepared: Recent[tuple[object, ...], PreparedLaunch] = field(default_factory=Recent, init=False)
    _launchers: Recent[int, Launcher] = field(default_factory=Recent, init=False)

    @classmethod
    def of(
        cls,
        library: Library,
        arena: Arena,
        placement: ExpertPlacement,
        watchdog: Watchdog,
        num_experts: int | None = None,
    ) -> CudaContext:
        """Return a context with its tables on the device."""
        topology, rank, device = arena.layout.topology, arena.rank, library.device
        num_local, locals_ = len(placement.rank_to_experts[rank]), topology.locals_of(topology.rank_to_node[rank])
        tables = PlanTables(
            expert_to_local=placement.local_index_table(rank, device)[:-1].int(),
            expert_to_rank=placement.membership_table(locals_, device)[:-1].int(),
            publishers=topology.rank_to_local,  # each rank publishes the routing of its counterparts
            num_local_experts=num_local,
            run_counts=torch.empty(library.num_sms * num_local, dtype=torch.int32, device=device),
            report=arena.report_address,
            reported_counts=pinned(torch.zeros(num_local, dtype=torch.int32, device="cpu"), device),
        )
        nodes = placement.membership_table(topology.rank_to_node, device)[:-1].int()
        return cls(
            arena=arena,
            library=library,
            placement=placement,
            num_experts=num_experts or placement.num_experts,
            watchdog=watchdog,
            tables=tables,
            expert_to_node=nodes,
        )

    def describe_invalid_id(self, token: int, k: int, physical_id: int) -> str:
        """Return the error message for an invalid id that a kernel has found."""
        expert_id = logical_id(physical_id, self.num_experts, self.placement.num_experts)
        return describe_invalid_id(token, k, expert_id, self.num_experts)

    def launcher(self, stream: torch.cuda.Stream) -> Launcher:
        """Return the launcher on a stream."""
        handle = stream.cuda_stream
        launcher = self._launchers.use(handle)
        if launcher is None:
            launcher = self._launchers[handle] = Launcher(self.library, self.arena.comm, handle, self._prepared)
        return launcher

    def program(
        self, steps: Sequence[tuple[tuple[str, str], KernelCall]], num_values: int, stream: torch.cuda.Stream
    ) -> Program:
        """Return the program of kernels, each with the track and name of its span; see ``is_timed``."""
        handle, report = stream.cuda_stream, self.arena.report_address
        if self.is_timed:
            parts = [(span, Program([call], num_values, handle, report)) for span, call in steps]
            return TimedProgram(parts, self)
        return Program([call for _, call in steps], num_values, handle, report)

    @property
    def is_timed(self) -> bool:
        """True if launches are recorded in a timeline."""
        return self.timeline is not NO_TIMELINE

    @property
    def gpu(self) -> Gpu:
        """The GPU."""
        return self.arena.gpu

    @property
    def layout(self) -> DeviceLayout:
        """The arena's layout."""
        return self.arena.layout

    @property
    def counts_offset(self) -> int:
        """Where the counts that ranks of the node exchange are in every arena; see ``share_counts``."""
        return self.layout.offsets["end"]

    @property
    def copies_offset(self) -> int:
        """Where copies of experts pass through every arena; see ``copy_experts``."""
        return self.counts_offset + shared_count_bytes(self.layout.num_ranks, self.placement.num_experts)

    @property
    def topology(self) -> Topology:
        """The ranks of each node."""
        return self.layout.topology

    @property
    def rank(self) -> int:
        """This rank."""
        return self.arena.rank

    @property
    def number(self) -> int:
        """This rank's number in the group."""
        return self.topology.numbers[self.rank]

    @property
    def node(self) -> int:
        """This rank's node."""
        return self.topology.rank_to_node[self.rank]

    def wire(self, dtype: torch.dtype, hidden: int) -> Wire:
        """Return the form in which partial sums of rows of ``dtype`` are sent between nodes."""
        return Wire.of(dtype, hidden, self.arena.layout.settings.wire_dtype)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which partial sums of rows of ``dtype`` are sent within a node."""
        wire_dtype = self.arena.layout.settings.sum_dtype
        return torch.promote_types(dtype, wire_dtype) if wire_dtype else dtype
