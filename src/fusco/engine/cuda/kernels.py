"""The kernels of a communicator: their compile-time constants, their arguments, their grids."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fusco.engine.cuda.arena import Arena
from fusco.engine.cuda.plan import DevicePlan
from fusco.kernels.cuda.arguments import CopyArgs, combine_type, plan_type, scatter_type, stage_type
from fusco.kernels.cuda.library import Library
from fusco.memory.device_layout import CHUNK_ROWS, MAX_PARTS
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
_COPY_THREADS, _PIECE_BYTES = 256, 16 << 10
_ELEMENT_TYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Rows to be moved: where this rank has them, bytes of a row, and where they go."""

    address: int
    row_bytes: int
    output_address: int = 0


def vector_bytes(row_bytes: int) -> int:
    """The widest access that divides a row."""
    return min(16, row_bytes & -row_bytes)


def split_segments(segments: torch.Tensor, piece_bytes: int) -> torch.Tensor:
    """Cut segments, int64 (3, num_segments) of source offset, destination offset and size, into small pieces.

    >>> split_segments(torch.tensor([[0, 50], [7, 90], [5, 0]]), 2).tolist()
    [[0, 2, 4], [7, 9, 11], [2, 2, 1]]
    """
    size = segments[2]
    num_pieces = (size + piece_bytes - 1) // piece_bytes
    whole = segments.repeat_interleave(num_pieces, dim=1)
    index = torch.arange(whole.shape[1]) - (num_pieces.cumsum(0) - num_pieces).repeat_interleave(num_pieces)
    start = index * piece_bytes
    return torch.stack([whole[0] + start, whole[1] + start, (whole[2] - start).clamp(max=piece_bytes)])


class Kernels:
    """Launches the kernels of one rank on the current stream."""

    def __init__(self, library: Library, arena: Arena, placement: ExpertPlacement) -> None:
        self._library, self._arena, self._placement = library, arena, placement
        self.stream = 0  # the handle of the stream to launch on
        self.num_sms = 0  # multiprocessors that moving rows took at once since this was last set to 0
        self._num_ranks = arena.layout.num_ranks
        device = library.device
        local = placement.local_index_table(arena.rank, device)
        self._expert_to_local = local[:-1].int()
        self._expert_to_rank = torch.tensor(placement.expert_to_rank, dtype=torch.int32, device=device)
        self._num_local = len(placement.rank_to_experts[arena.rank])
        self._run_counts = torch.empty(library.num_sms * self._num_local, dtype=torch.int32, device=device)

    def plan(
        self,
        plan: DevicePlan,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        *,
        expert_alignment: int,
        is_overflow_reported: bool,
        max_slots: int,
        ticket: int,
        num_sms: int | None,
    ) -> None:
        """Exchange routing and fill the plan's tensors."""
        num_pairs = plan.first_row[-1] * plan.num_topk
        grid = max(1, min(self._sms(num_sms), -(-num_pairs // _PAIRS_PER_PLAN_BLOCK)))
        arguments = plan_type(self._num_ranks)(
            comm=self._arena.comm,
            topk_idx=topk_idx.data_ptr(),
            topk_weights=0 if topk_weights is None else topk_weights.data_ptr(),
            expert_to_local=self._expert_to_local.data_ptr(),
            expert_to_rank=self._expert_to_rank.data_ptr(),
            row_to_slots=plan.row_to_slots.data_ptr(),
            row_weights=0 if plan.weights is None else plan.weights.data_ptr(),
            num_rows_per_expert=plan.num_rows_per_expert.data_ptr(),
            block_to_first_slot=plan.block_to_first_slot.data_ptr(),
            token_to_ranks=plan.token_to_ranks.data_ptr(),
            run_counts=self._run_counts.data_ptr(),
            report=self._arena.report_address,
            first_row=plan.first_row,
            num_experts=self._placement.num_experts,
            num_local_experts=self._num_local,
            expert_alignment=expert_alignment,
            max_slots=max_slots,
            is_overflow_reported=int(is_overflow_reported),
            ticket=ticket,
        )
        num_words = (_PLAN_THREADS // _WARP_SIZE + 3) * self._num_local + 1
        constants = {
            "NUM_TOPK": plan.num_topk,
            "ID_BYTES": topk_idx.element_size(),
            "WEIGHT_BYTES": 0 if topk_weights is None else topk_weights.element_size(),
        }
        self._launch("plan", constants, arguments, grid, _PLAN_THREADS, shared_bytes=4 * num_words)

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
        self.num_sms += grid
        self._launch("stage_rows", constants, arguments, grid, _STAGE_THREADS, stream=stream)

    def _share_for_staging(self, num_sms: int | None) -> int:
        """How much of a budget goes to staging: what fills the pool faster than links empty it.

        Not more, as it runs beside planning and pulling and would only slow them down.
        """
        return max(1, num_sms // 4) if num_sms else min(_STAGE_SMS, self._library.num_sms)

    def scatter(
        self,
        plan: DevicePlan,
        payloads: Sequence[Payload],
        rows: Sequence[Sequence[int]],
        in_place_ranks: int,
        num_sms: int | None,
    ) -> None:
        """Pull rows into their slots. ``rows[r][p]`` is where payload ``p`` of rank ``r`` can be read."""
        is_staged = not in_place_ranks >> self._arena.rank & 1
        wanted = num_sms or _SCATTER_SMS_TIMES_RANKS // self._num_ranks
        if num_sms and is_staged:
            wanted -= self._share_for_staging(num_sms)
        grid = max(1, min(wanted, self._library.num_sms))
        row_type = ctypes.c_uint64 * len(payloads)
        arguments = scatter_type(self._num_ranks, len(payloads))(
            comm=self._arena.comm,
            rows=tuple(row_type(*of_rank) for of_rank in rows),
            outputs=tuple(payload.output_address for payload in payloads),
            row_to_slots=plan.row_to_slots.data_ptr(),
            block_to_first_slot=plan.block_to_first_slot.data_ptr(),
            num_rows_per_expert=plan.num_rows_per_expert.data_ptr(),
            first_row=plan.first_row,
            num_local_experts=self._num_local,
            longest=plan.longest,
            parts=self._parts(plan),
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
        self.num_sms += grid
        self._launch("scatter_rows", constants, arguments, grid, _SCATTER_THREADS)

    def combine(
        self,
        plan: DevicePlan,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        wire_dtype: torch.dtype,
        out: torch.Tensor,
        num_sms: int | None,
    ) -> None:
        """Sum expert-major rows into the owners' token-major rows."""
        sms = self._sms(num_sms)
        num_threads, blocks_per_sm, unroll = _COMBINE_ON_FEW_SMS if sms <= _FEW_SMS else _COMBINE_ON_MANY_SMS
        self.num_sms, grid = sms, sms * blocks_per_sm
        arguments = combine_type(self._num_ranks)(
            comm=self._arena.comm,
            rows=rows.data_ptr(),
            out=out.data_ptr(),
            row_to_slots=plan.row_to_slots.data_ptr(),
            row_weights=0 if weights is None else weights.data_ptr(),
            token_to_ranks=plan.token_to_ranks.data_ptr(),
            first_row=plan.first_row,
            longest=plan.longest,
            parts=self._parts(plan),
        )
        hidden, item_bytes = rows.shape[1], rows.element_size()
        constants = {
            "NUM_TOPK": plan.num_topk,
            "HIDDEN": hidden,
            "ROW_TYPE": _ELEMENT_TYPES[rows.dtype],
            "WIRE_TYPE": _ELEMENT_TYPES[wire_dtype],
            "WEIGHT_BYTES": 0 if weights is None else weights.element_size(),
            "VECTOR_ELEMENTS": vector_bytes(hidden * item_bytes) // item_bytes,
            "MAX_PARTS": MAX_PARTS,
            "BLOCKS_PER_SM": blocks_per_sm,
            "UNROLL": unroll,
        }
        self._launch("combine_rows", constants, arguments, grid, num_threads)

    def copy_segments(
        self,
        src: torch.Tensor,
        src_offset: torch.Tensor,
        dst: torch.Tensor,
        dst_offset: torch.Tensor,
        num_bytes: torch.Tensor,
    ) -> None:
        """See ``fusco.kernels.copy_segments``; the memory is on the device (a peer's, perhaps), the arrays are not."""
        pieces = split_segments(torch.stack([src_offset, dst_offset, num_bytes]), _PIECE_BYTES)
        if not pieces.shape[1]:
            return
        # From pinned memory, which stays allocated until the stream has read it.
        on_device = pieces.pin_memory().to(self._library.device, non_blocking=True)
        arguments = CopyArgs(
            src=src.data_ptr(), dst=dst.data_ptr(), pieces=on_device.data_ptr(), num_pieces=pieces.shape[1]
        )
        grid = min(pieces.shape[1], self._library.num_sms * 4)
        self._launch("copy_segments", {}, arguments, grid, _COPY_THREADS)

    def _sms(self, num_sms: int | None) -> int:
        return min(num_sms or self._library.num_sms, self._library.num_sms)

    def _parts(self, plan: DevicePlan) -> int:
        """How many warps share a row."""
        num_rows = max(1, plan.longest * self._num_ranks)
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
        )
