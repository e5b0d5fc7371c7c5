"""The kernels of a communicator: their compile-time constants, their arguments, their grids."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fusco.engine.cuda.arena import Arena
from fusco.engine.cuda.plan import DevicePlan, HeldRows
from fusco.kernels.cuda.arguments import (
    CopyArgs,
    ForwardingArgs,
    combine_type,
    gather_type,
    plan_type,
    returned_type,
    scatter_type,
    stage_type,
)
from fusco.kernels.cuda.library import Library
from fusco.kernels.cuda.widths import ELEMENT_TYPES, vector_bytes
from fusco.kernels.reduce_rows import accumulation_dtype
from fusco.kernels.reference.plan_forwarding import DeviceForwarding
from fusco.memory.device_layout import CHUNK_PAIRS, CHUNK_ROWS, MAX_PARTS
from fusco.placement import ExpertPlacement

_WARP_SIZE = 32
_PLAN_THREADS, _PAIRS_PER_PLAN_BLOCK = 512, 1024
_STAGE_THREADS, _STAGE_SMS = 512, 16
# Half of a multiprocessor, so that staging fits beside it.
_SCATTER_THREADS, _SCATTER_UNROLL = 512, 8
# Threads of a block, blocks on a multiprocessor, vectors in flight for each lane. On few multiprocessors many warps
# hide latency; on many, fewer warps with more in flight each do so at less contention.
_FEW_SMS = 40
_COMBINE_ON_FEW_SMS, _COMBINE_ON_MANY_SMS = (512, 2, 2), (384, 1, 7)
# Fewer rows than this are divided among warps, so that every warp has several shares and all end together.
# Ranks must agree on the parts of a row, as each part is announced for itself: so nothing but the plan may enter here.
_ROWS_FOR_ALL_WARPS = 12_000
# Enough to fill the links and write the copies, of which there are the more the fewer ranks share the experts; more
# multiprocessors only contend.
_SCATTER_SMS_TIMES_RANKS = 192
# What a block copies at a time: less only if there are not enough bytes for all blocks.
_COPY_THREADS, _MIN_PIECE_BYTES, _MAX_PIECE_BYTES = 256, 1 << 10, 16 << 10
# Enough to pack rows several times as fast as any network takes them.
_GATHER_THREADS, _GATHER_SMS = 512, 8
_FORWARDING_THREADS, _RETURNED_THREADS = 1024, 256


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Rows to be moved: where this rank has them, bytes of a row, and where they go."""

    address: int
    row_bytes: int
    output_address: int = 0


@dataclass(frozen=True, kw_only=True)
class PublishedRouting:
    """Routing of a source that this rank makes known to its node: ids (num_rows, num_topk) and weights, contiguous."""

    source: int
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None


def plan_shared_bytes(num_local_experts: int) -> int:
    """Shared memory of a block that plans: counts of each warp, and what is before, in all, and first."""
    return 4 * ((_PLAN_THREADS // _WARP_SIZE + 3) * num_local_experts + 1)


class Kernels:
    """Launches the kernels of one rank on the current stream."""

    def __init__(self, library: Library, arena: Arena, placement: ExpertPlacement) -> None:
        self._library, self._arena, self._placement = library, arena, placement
        self.stream = 0  # the handle of the stream to launch on
        self.num_sms = 0  # multiprocessors that moving rows took at once since ``begin``
        self._staging_sms = 0
        topology, rank, device = arena.layout.topology, arena.rank, library.device
        self._num_ranks, self._num_nodes = topology.ranks_per_node, topology.num_nodes
        self._publishers = topology.rank_to_local  # each rank publishes the routing of its counterparts
        self._expert_to_local = placement.local_index_table(rank, device)[:-1].int()
        node = topology.rank_to_node[rank]
        places = zip(topology.rank_to_node, topology.rank_to_local, strict=True)
        rank_to_place = [local if of_rank == node else -1 for of_rank, local in places]
        self._expert_to_rank = placement.membership_table(rank_to_place, device)[:-1].int()
        self._num_local = len(placement.rank_to_experts[rank])
        self._run_counts = torch.empty(library.num_sms * self._num_local, dtype=torch.int32, device=device)

    def begin(self, stream: int) -> None:
        """From now on launch for another call, on a stream given as its handle."""
        self.stream, self.num_sms, self._staging_sms = stream, 0, 0

    def plan(
        self,
        plan: DevicePlan,
        published: Sequence[PublishedRouting],
        *,
        expert_alignment: int,
        is_overflow_reported: bool,
        max_slots: int,
        ticket: int,
        num_sms: int | None,
    ) -> None:
        """Exchange routing within the node and fill the plan's tensors; ``published`` has one entry for each node."""
        num_pairs = plan.first_row[-1] * plan.num_topk
        grid = max(1, min(self._sms(num_sms), -(-num_pairs // _PAIRS_PER_PLAN_BLOCK)))
        arguments = plan_type(self._num_ranks, self._num_nodes)(
            comm=self._arena.comm,
            topk_idx=tuple(routing.topk_idx.data_ptr() for routing in published),
            topk_weights=tuple(_address(routing.topk_weights) for routing in published),
            expert_to_local=self._expert_to_local.data_ptr(),
            expert_to_rank=self._expert_to_rank.data_ptr(),
            row_to_slots=plan.row_to_slots.data_ptr(),
            row_weights=_address(plan.weights),
            num_rows_per_expert=plan.num_rows_per_expert.data_ptr(),
            block_to_first_slot=plan.block_to_first_slot.data_ptr(),
            token_to_ranks=plan.token_to_ranks.data_ptr(),
            run_counts=self._run_counts.data_ptr(),
            report=self._arena.report_address,
            first_row=plan.first_row,
            publishers=self._publishers,
            published=tuple(routing.source for routing in published),
            held=plan.held,
            num_experts=self._placement.num_experts,
            num_local_experts=self._num_local,
            expert_alignment=expert_alignment,
            max_slots=max_slots,
            is_overflow_reported=int(is_overflow_reported),
            ticket=ticket,
        )
        constants = {
            "NUM_NODES": self._num_nodes,
            "NUM_TOPK": plan.num_topk,
            "ID_BYTES": published[0].topk_idx.element_size(),
            "WEIGHT_BYTES": 0 if plan.weights is None else plan.weights.element_size(),
            "CHUNK_PAIRS": CHUNK_PAIRS,
        }
        shared_bytes = plan_shared_bytes(self._num_local)
        self._launch("plan", constants, arguments, grid, _PLAN_THREADS, shared_bytes=shared_bytes)

    def stage(
        self, payloads: Sequence[Payload], pools: Sequence[int], num_tokens: int, num_sms: int | None, stream: int
    ) -> None:
        """Copy rows into the pool that peers read; leaves most of a budget of multiprocessors to those that pull."""
        num_chunks = -(-num_tokens // CHUNK_ROWS)
        arguments = stage_type(self._num_ranks, len(payloads))(
            comm=self._arena.comm,
            payloads=tuple(payload.address for payload in payloads),
            pools=tuple(pools),
            row_bytes=tuple(payload.row_bytes for payload in payloads),
            num_tokens=num_tokens,
        )
        constants = {"NUM_PAYLOADS": len(payloads), "CHUNK_ROWS": CHUNK_ROWS}
        grid = max(1, min(self._share_for_staging(num_sms), num_chunks))
        self._staging_sms = grid
        self._take(grid)
        self._launch("stage_rows", constants, arguments, grid, _STAGE_THREADS, stream=stream)

    def _share_for_staging(self, num_sms: int | None) -> int:
        """How much of a budget goes to staging: what fills the pool faster than links empty it.

        Not more, as it runs beside planning and pulling and would only slow them down.
        """
        return max(1, num_sms // 4) if num_sms else min(_STAGE_SMS, self._library.num_sms)

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
        """Pull rows into their slots. ``rows[r][p]`` is where payload ``p`` of what rank ``r`` holds can be read."""
        is_staged = not in_place_ranks >> self._arena.local & 1
        wanted = num_sms or _SCATTER_SMS_TIMES_RANKS // self._num_ranks
        if num_sms and is_staged:
            wanted -= self._share_for_staging(num_sms)
        grid = max(1, min(wanted, self._library.num_sms))
        row_type = ctypes.c_uint64 * len(payloads)
        arguments = scatter_type(self._num_ranks, len(payloads))(
            comm=self._arena.comm,
            rows=tuple(row_type(*of_rank) for of_rank in rows),
            outputs=tuple(payload.output_address for payload in payloads),
            row_to_slots=held.row_to_slots.data_ptr(),
            block_to_first_slot=plan.block_to_first_slot.data_ptr(),
            num_rows_per_expert=plan.num_rows_per_expert.data_ptr(),
            first_row=held.first_row,
            num_local_experts=self._num_local if clears_padding else 0,
            longest=held.longest,
            parts=self._parts(held),
            in_place_ranks=in_place_ranks,
        )
        constants = {
            "NUM_TOPK": plan.num_topk,
            "NUM_PAYLOADS": len(payloads),
            "PAYLOAD_BYTES": ",".join(str(payload.row_bytes) for payload in payloads),
            "VECTOR_BYTES": ",".join(str(vector_bytes(payload.row_bytes)) for payload in payloads),
            "CHUNK_ROWS": CHUNK_ROWS,
            "UNROLL": _SCATTER_UNROLL,
        }
        self._take(grid + self._staging_sms if is_staged else grid)
        self._launch("scatter_rows", constants, arguments, grid, _SCATTER_THREADS, comes_early=True)

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
        """Sum expert-major rows into the rows that their holders have; ``out`` has this rank's."""
        sms = self._sms(num_sms)
        num_threads, blocks_per_sm, unroll = _COMBINE_ON_FEW_SMS if sms <= _FEW_SMS else _COMBINE_ON_MANY_SMS
        self._take(sms)
        grid = sms * blocks_per_sm
        weights = held.weights if is_weighted else None
        arguments = combine_type(self._num_ranks)(
            comm=self._arena.comm,
            rows=rows.data_ptr(),
            out=out.data_ptr(),
            row_to_slots=held.row_to_slots.data_ptr(),
            row_weights=_address(weights),
            token_to_ranks=held.token_to_ranks.data_ptr(),
            first_row=held.first_row,
            longest=held.longest,
            parts=self._parts(held),
        )
        hidden, item_bytes = rows.shape[1], rows.element_size()
        constants = {
            "NUM_TOPK": held.row_to_slots.shape[1],
            "HIDDEN": hidden,
            "ROW_TYPE": ELEMENT_TYPES[rows.dtype],
            "WIRE_TYPE": ELEMENT_TYPES[wire_dtype],
            "OUT_TYPE": ELEMENT_TYPES[out.dtype],
            "WEIGHT_BYTES": 0 if weights is None else weights.element_size(),
            "VECTOR_ELEMENTS": vector_bytes(hidden * item_bytes) // item_bytes,
            "MAX_PARTS": MAX_PARTS,
            "BLOCKS_PER_SM": blocks_per_sm,
            "UNROLL": unroll,
        }
        self._launch("combine_rows", constants, arguments, grid, num_threads)

    def forwarding(
        self, topk_idx: torch.Tensor, expert_to_node: torch.Tensor, num_nodes: int, own_node: int, summary: torch.Tensor
    ) -> DeviceForwarding:
        """Plan what a rank sends to each other node.

        Args:
            topk_idx: int32 or int64 (num_tokens, num_topk), contiguous.
            expert_to_node: int32 (num_experts,).
            num_nodes: how many nodes there are.
            own_node: nothing crosses to it.
            summary: see ``DeviceForwarding``; in pinned memory, to be read once the kernel is done.

        """
        num_tokens = len(topk_idx)
        plan = DeviceForwarding(
            node_to_tokens=topk_idx.new_empty(num_nodes, num_tokens + 1, dtype=torch.int32),
            token_to_place=topk_idx.new_empty(num_nodes, num_tokens, dtype=torch.int32),
            summary=summary,
        )
        arguments = ForwardingArgs(
            topk_idx=topk_idx.data_ptr(),
            expert_to_node=expert_to_node.data_ptr(),
            node_to_tokens=plan.node_to_tokens.data_ptr(),
            token_to_place=plan.token_to_place.data_ptr(),
            summary=summary.data_ptr(),
            num_tokens=num_tokens,
            num_experts=len(expert_to_node),
            num_nodes=num_nodes,
            own_node=own_node,
        )
        constants = {"NUM_TOPK": topk_idx.shape[1], "ID_BYTES": topk_idx.element_size()}
        self._launch("plan_forwarding", constants, arguments, num_nodes, _FORWARDING_THREADS)
        return plan

    def gather(self, rows: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: int) -> None:
        """Pack rows into messages: for each part ``rows[places[i]]``, in order of ``i``, into the front of its bytes.

        Args:
            rows: contiguous; they and every message stand on multiples of 16 bytes, or of what divides a row.
            parts: int32 ``places``, and a message of bytes; as many at every call, some of them empty.
            stream: the handle of a stream.

        """
        row_bytes = rows.shape[1:].numel() * rows.element_size()
        first_row = (0, *itertools.accumulate(len(places) for places, _ in parts))
        if not (first_row[-1] and row_bytes):
            return
        arguments = gather_type(len(parts))(
            rows=rows.data_ptr(),
            messages=tuple(message.data_ptr() for _, message in parts),
            places=tuple(places.data_ptr() for places, _ in parts),
            first_row=first_row,
        )
        constants = {"NUM_MESSAGES": len(parts), "ROW_BYTES": row_bytes, "VECTOR_BYTES": vector_bytes(row_bytes)}
        grid = min(first_row[-1], _GATHER_SMS)
        self._launch("gather_rows", constants, arguments, grid, _GATHER_THREADS, stream=stream)

    def add_returned(
        self, own: torch.Tensor, returned: Sequence[torch.Tensor], places: Sequence[torch.Tensor], out: torch.Tensor
    ) -> None:
        """``out[t]``: ``own[t]`` and, for each other node, ``returned[place of t]``; see the twin."""
        num_tokens, hidden = out.shape
        if not num_tokens:
            return
        arguments = returned_type(len(returned))(
            own=own.data_ptr(),
            returned=tuple(rows.data_ptr() for rows in returned),
            places=tuple(of_node.data_ptr() for of_node in places),
            out=out.data_ptr(),
            num_tokens=num_tokens,
        )
        assert own.dtype == accumulation_dtype(out.dtype), (own.dtype, out.dtype)
        constants = {
            "NUM_REMOTE": len(returned),
            "HIDDEN": hidden,
            "ROW_TYPE": ELEMENT_TYPES[out.dtype],
            "WIRE_TYPE": ELEMENT_TYPES[returned[0].dtype],
            "VECTOR_ELEMENTS": vector_bytes(hidden * out.element_size()) // out.element_size(),
        }
        grid = min(-(-num_tokens * _WARP_SIZE // _RETURNED_THREADS), self._library.num_sms * 4)
        self._launch("add_returned", constants, arguments, grid, _RETURNED_THREADS)

    def copy_segments(
        self,
        src: torch.Tensor,
        src_offset: torch.Tensor,
        dst: torch.Tensor,
        dst_offset: torch.Tensor,
        num_bytes: torch.Tensor,
    ) -> None:
        """See ``fusco.kernels.copy_segments``; the memory is on the device (a peer's, perhaps), the arrays are not."""
        if len(num_bytes) == 1:
            # As nearly all messages are: no table needs to be made and sent.
            begin, first, size = int(dst_offset), int(src_offset), int(num_bytes)
            dst[begin : begin + size].copy_(src[first : first + size])
            return
        ends = num_bytes.cumsum(0)
        total = int(ends[-1]) if len(ends) else 0
        if not total:
            return
        # From pinned memory, which stays allocated until the stream has read it.
        table = torch.stack([src_offset, dst_offset, ends]).pin_memory().to(self._library.device, non_blocking=True)
        max_grid = self._library.num_sms * 4
        piece_bytes = min(_MAX_PIECE_BYTES, max(_MIN_PIECE_BYTES, -(-total // max_grid)))
        arguments = CopyArgs(
            src=src.data_ptr(),
            dst=dst.data_ptr(),
            segments=table.data_ptr(),
            num_segments=len(ends),
            piece_bytes=piece_bytes,
        )
        self._launch("copy_segments", {}, arguments, min(-(-total // piece_bytes), max_grid), _COPY_THREADS)

    def _take(self, num_sms: int) -> None:
        """Count multiprocessors that are at work at once."""
        self.num_sms = max(self.num_sms, num_sms)

    def _sms(self, num_sms: int | None) -> int:
        return min(num_sms or self._library.num_sms, self._library.num_sms)

    def _parts(self, held: HeldRows) -> int:
        """How many warps share a row."""
        num_rows = max(1, held.longest * self._num_ranks)
        return max(1, min(MAX_PARTS, _ROWS_FOR_ALL_WARPS // num_rows))

    def _launch(
        self,
        name: str,
        constants: Mapping[str, object],
        arguments: ctypes.Structure,
        grid: int,
        num_threads: int,
        *,
        shared_bytes: int = 0,
        stream: int | None = None,
        comes_early: bool = False,
    ) -> None:
        always: dict[str, object] = {
            "ARGUMENT_BYTES": ctypes.sizeof(arguments),
            "NUM_RANKS": self._num_ranks,
            "NUM_THREADS": num_threads,
        }
        kernel = self._library.get(name, always | dict(constants))
        kernel.launch(
            arguments,
            self.stream if stream is None else stream,
            grid=grid,
            num_threads=num_threads,
            shared_bytes=shared_bytes,
            comes_early=comes_early,
        )


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
