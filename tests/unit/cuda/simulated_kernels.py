"""The CUDA kernels by their twins: each reads the struct that the kernel is launched with, and waits as it does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from native_functions import BoundByAddress
from simulated_device import Machine, Stream, driver_functions

from fusco.core.quantization import Quantize
from fusco.core.rows import accumulation_dtype
from fusco.cuda.kernels.abi import vector_bytes
from fusco.cuda.kernels.comm import Report
from fusco.planner.routing import Routing
from reference.add_returned import add_returned
from reference.combine_rows import combine_rows, sum_partially
from reference.plan import mark_ranks, plan_slots
from reference.plan_forwarding import plan_forwarding
from reference.quantize_rows import quantize_rows
from reference.scatter_rows import scatter_rows

_ELEMENT_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
_IDS = {4: torch.int32, 8: torch.int64}
_WEIGHTS = {4: torch.float32, 8: torch.float64}
_FORMATS = {
    "AMAX": lambda block, _: Quantize(block=block),
    "POWER_OF_TWO": lambda block, size: Quantize(block=block, scale="ue8m0" if size == 1 else "power-of-two"),
    "MX_FLOOR": lambda *_: Quantize("mxfp8", rounding="floor"),
    "MX_CEIL": lambda *_: Quantize("mxfp8"),
    "NVFP4": lambda *_: Quantize("nvfp4"),  # global scale 1
}
_I32 = torch.int32
_LARGEST_I32 = 2**31 - 1


class NodeWords:
    """Flags between ranks of a node, with epochs counted as on the device."""

    def __init__(self, num_ranks: int) -> None:
        self.routing, self.rows, self.rows_released, self.rows_epoch = ([0] * num_ranks for _ in range(4))
        self.sums, self.sums_released, self.combine_epoch = ([0] * num_ranks for _ in range(3))
        self.plan_epoch = [0] * num_ranks
        self.barriers = [0] * num_ranks  # that each rank has come to


class SimulatedLibrary:
    """Replaces ``Library``."""

    def __init__(self, machine: Machine, words: NodeWords) -> None:
        self.device, self.num_sms, self.max_shared_bytes = torch.device("cpu"), 132, 227 << 10
        self._machine, self._words = machine, words
        self._functions = driver_functions(machine)

    def address_of(self, function: str) -> int:
        return self._functions[function].address

    def get(self, name: str, constants: Mapping[str, Any]) -> SimulatedKernel:
        return SimulatedKernel(self._machine, self._words, name, constants)


def copy_of(arguments: ctypes.Structure) -> ctypes.Structure:
    """Arguments as they are now: the driver copies them when a kernel is launched."""
    return type(arguments).from_buffer_copy(arguments)


class SimulatedKernel(BoundByAddress):
    """Replaces ``Kernel``."""

    def __init__(self, machine: Machine, words: NodeWords, name: str, constants: Mapping[str, Any]) -> None:
        self._machine, self._words, self.name, self._constants = machine, words, name, constants
        self._at = machine.at

    def launch(self, arguments: ctypes.Structure, stream: int, *, grid: int, num_threads: int, **_: Any) -> None:
        assert grid >= 1
        assert ctypes.sizeof(arguments) == self._constants["ARGUMENT_BYTES"]
        launch: Callable[[Stream, Any], None] = getattr(self, f"_{self.name}")
        launch(self._machine.stream_of(stream), copy_of(arguments))

    def _plan(self, stream: Stream, args: Any) -> None:
        words, rank = self._words, args.comm.rank

        def publish() -> None:
            Report.from_address(args.report).begun = args.ticket
            epoch = words.plan_epoch[rank] + 1
            for i, src in enumerate(args.published):
                for peer in range(self._constants["NUM_RANKS"]):
                    self._push_routing(args, i, src, peer, epoch)
            words.routing[rank] = epoch

        def make() -> None:
            words.plan_epoch[rank] += 1
            self._make_plan(args, words.plan_epoch[rank])

        stream.launch("publishing routing", publish)
        stream.launch("planning", make, lambda: min(words.routing) > words.plan_epoch[rank])

    def _push_routing(self, args: Any, published: int, src: int, peer: int, epoch: int) -> None:
        shape = (args.first_row[src + 1] - args.first_row[src], self._constants["NUM_TOPK"])
        ids = self._at(args.topk_idx[published], _I32 if published else _IDS[self._constants["ID_BYTES"]], shape)
        self._pooled(args, peer, src, epoch, "ids", _I32).copy_(ids.clamp(-_LARGEST_I32, _LARGEST_I32))
        if dtype := _WEIGHTS.get(self._constants["WEIGHT_BYTES"]):
            weights = self._at(args.topk_weights[published], dtype, shape)
            self._pooled(args, peer, src, epoch, "weights", dtype).copy_(weights)

    def _pooled(self, args: Any, peer: int, src: int, epoch: int, section: str, dtype: torch.dtype) -> torch.Tensor:
        comm, num_sources = args.comm, len(args.first_row) - 1
        num_rows, num_topk = args.first_row[src + 1] - args.first_row[src], self._constants["NUM_TOPK"]
        assert num_rows * num_topk <= comm.max_tokens * comm.max_topk
        first_pair = (epoch % 2 * num_sources + src) * comm.max_tokens * comm.max_topk
        address = comm.arena[peer] + getattr(comm, section) + first_pair * dtype.itemsize
        return self._at(address, dtype, (num_rows, num_topk))

    def _make_plan(self, args: Any, epoch: int) -> None:
        rank, num_sources = args.comm.rank, len(args.first_row) - 1
        of_source = [self._pooled(args, rank, src, epoch, "ids", _I32) for src in range(num_sources)]
        ids = torch.cat(of_source)
        experts = (args.num_experts,)
        to_local, to_rank = (self._at(table, _I32, experts) for table in (args.expert_to_local, args.expert_to_rank))
        num_local = args.num_local_experts
        limits = args.max_slots, args.rows_per_expert or None
        plan = plan_slots(ids, to_local, num_local, args.expert_alignment, *limits)
        self._at(args.row_to_slots, _I32, ids.shape).copy_(plan.row_to_slots)
        self._at(args.num_rows_per_expert, torch.int64, (num_local,)).copy_(plan.num_rows_per_expert)
        needed = torch.tensor([plan.num_slots_needed], dtype=_I32)
        blocks = [plan.block_to_first_slot, plan.block_to_end_slot, plan.num_dropped_per_expert, needed]
        self._at(args.block_to_first_slot, _I32, (3 * num_local + 1,)).copy_(torch.cat(blocks))
        marks = torch.cat([mark_ranks(of_source[src], to_rank) for src in args.held[: args.num_held]])
        self._at(args.token_to_ranks, _I32, marks.shape).copy_(marks)
        if dtype := _WEIGHTS.get(self._constants["WEIGHT_BYTES"]):
            weights = torch.cat([self._pooled(args, rank, src, epoch, "weights", dtype) for src in range(num_sources)])
            self._at(args.row_weights, dtype, ids.shape).copy_(weights)
        report = Report.from_address(args.report)
        bad = report.bad if args.ticket else report.bad_static
        for src, of in enumerate(of_source):
            wrong = ((of < -1) | (of >= args.num_experts)).nonzero().tolist()
            if wrong and (args.ticket or bad.src < 0):
                (bad.token, bad.k), bad.id, bad.src = wrong[0], int(of[tuple(wrong[0])]), src
                break
        limit = args.rows_per_expert or args.max_slots
        if plan.num_slots_needed > limit and args.is_overflow_reported and not report.overflow_needed:
            report.overflow_limit, report.overflow_needed = limit, plan.num_slots_needed
            wanted = (plan.num_rows_per_expert + plan.num_dropped_per_expert).tolist()
            report.overflow_expert = 1 + wanted.index(plan.num_slots_needed) if args.rows_per_expert else 0
        report.num_slots = plan.num_slots_needed
        if args.ticket:
            counts = (ctypes.c_int32 * num_local).from_address(args.reported_counts)
            counts[:] = plan.num_rows_per_expert.tolist()
            report.ticket = args.ticket

    def _scatter_rows(self, stream: Stream, args: Any) -> None:
        words, rank = self._words, args.comm.rank

        def push() -> None:
            self._push(args)
            words.rows[rank] = words.rows_epoch[rank] + 1

        def is_memory_free() -> bool:
            has_read = min(words.rows_released) >= words.rows_epoch[rank]
            return has_read and min(words.sums_released) >= words.combine_epoch[rank]

        def scatter() -> None:
            self._scatter(args)
            words.rows_epoch[rank] += 1
            words.rows_released[rank] = words.rows_epoch[rank]

        wanted_from = cache(lambda: self._wanted_from(args))  # not asked before the plan is made

        def have_rows_come() -> bool:
            return all(words.rows[src] > words.rows_epoch[rank] for src in wanted_from())

        stream.launch("pushing rows", push, is_memory_free)
        stream.launch("scattering rows", scatter, have_rows_come)

    def _row_bytes(self) -> list[int]:
        return [int(size) for size in str(self._constants["PAYLOAD_BYTES"]).split(",")]

    def _push(self, args: Any) -> None:
        comm, marks = args.comm, self._marks(args)
        if self._constants["IS_EARLY"]:  # rows are pushed before the plan is made: by the same marks
            ids = self._at(args.topk_idx, _IDS[args.id_bytes], (len(marks), self._constants["NUM_TOPK"]))
            to_rank = self._at(args.expert_to_rank, _I32, (args.num_experts,))
            assert torch.equal(mark_ranks(ids.clamp(-_LARGEST_I32, _LARGEST_I32).int(), to_rank), marks)
        for p, row_bytes in enumerate(self._row_bytes()):
            rows = self._at(args.rows[p], torch.uint8, (len(marks), row_bytes))
            for peer in range(self._constants["NUM_RANKS"]):
                if peer != comm.rank:
                    is_wanted = (marks >> peer & 1).bool()
                    there = self._at(comm.arena[peer] + args.received[comm.rank][p], torch.uint8, rows.shape)
                    there[is_wanted] = rows[is_wanted]

    def _slots_of(self, args: Any, holder: int) -> torch.Tensor:
        num_topk, first, end = self._constants["NUM_TOPK"], args.first_row[holder], args.first_row[holder + 1]
        return self._at(args.row_to_slots + first * num_topk * 4, _I32, (end - first, num_topk))

    def _wanted_from(self, args: Any) -> list[int]:
        """Ranks whose rows have a slot here: a row without is not waited for."""
        ranks = range(self._constants["NUM_RANKS"])
        return [src for src in ranks if src != args.comm.rank and (self._slots_of(args, src) >= 0).any()]

    def _scatter(self, args: Any) -> None:
        comm, ranks = args.comm, range(self._constants["NUM_RANKS"])
        slots = [self._slots_of(args, src) for src in ranks]
        assert args.longest == max(map(len, slots))
        num_local = args.num_local_experts
        firsts, ends = self._at(args.block_to_first_slot, _I32, (2, num_local)).tolist()
        counts = self._at(args.num_rows_per_expert, torch.int64, (num_local,)).tolist()
        for p, row_bytes in enumerate(self._row_bytes()):
            for src in ranks:
                at = args.rows[p] if src == comm.rank else comm.arena[comm.rank] + args.received[src][p]
                assert at % vector_bytes(row_bytes) == 0, "an access that is not aligned"
                rows = self._at(at, torch.uint8, (len(slots[src]), row_bytes))
                num_slots = max(0, int(slots[src].max()) + 1) if slots[src].numel() else 0
                scattered = scatter_rows(rows, slots[src], num_slots)
                filled = slots[src][slots[src] >= 0].long()
                output = self._at(args.outputs[p], torch.uint8, (num_slots, row_bytes))
                output[filled] = scattered[filled]
            for expert in range(num_local):
                begin, end = firsts[expert] + counts[expert], ends[expert]
                self._at(args.outputs[p] + begin * row_bytes, torch.uint8, (end - begin, row_bytes)).zero_()

    def _combine_rows(self, stream: Stream, args: Any) -> None:
        words, rank = self._words, args.comm.rank

        def send() -> None:
            for dst in range(self._constants["NUM_RANKS"]):
                if dst != rank:
                    self._send_sums(args, dst)
            words.sums[rank] = words.combine_epoch[rank] + 1

        awaited = cache(lambda: self._awaited(args))

        def have_sums_come() -> bool:
            return all(words.sums[src] > words.combine_epoch[rank] for src in awaited())

        def add() -> None:
            self._add_sums(args)
            words.combine_epoch[rank] += 1
            words.sums_released[rank] = words.combine_epoch[rank]

        def is_memory_free() -> bool:
            has_added = min(words.sums_released) >= words.combine_epoch[rank]
            return has_added and min(words.rows_released) >= words.rows_epoch[rank]

        stream.launch("sending sums", send, is_memory_free)
        stream.launch("adding sums", add, have_sums_come)

    def _marks(self, args: Any) -> torch.Tensor:
        rank = args.comm.rank
        return self._at(args.token_to_ranks, _I32, (args.first_row[rank + 1] - args.first_row[rank],))

    def _awaited(self, args: Any) -> list[int]:
        marks = self._marks(args)
        ranks = range(self._constants["NUM_RANKS"])
        return [src for src in ranks if src != args.comm.rank and (marks >> src & 1).any()]

    def _terms(self, args: Any, holder: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Expert-major rows, and slots and weights of what a rank holds."""
        slots = self._slots_of(args, holder)
        num_slots = max(0, int(slots.max()) + 1) if slots.numel() else 0
        rows = self._at(args.rows, _ELEMENT_TYPES[self._constants["ROW_TYPE"]], (num_slots, self._constants["HIDDEN"]))
        dtype = _WEIGHTS.get(self._constants["WEIGHT_BYTES"])
        if dtype is None:
            return rows, slots, None
        before = args.first_row[holder] * self._constants["NUM_TOPK"] * dtype.itemsize
        return rows, slots, self._at(args.row_weights + before, dtype, slots.shape)

    def _sums(self, args: Any, at: int, src: int, num_rows: int) -> torch.Tensor:
        """Where ``src`` leaves its partial sums for rank ``at``."""
        comm, wire_dtype = args.comm, _ELEMENT_TYPES[self._constants["WIRE_TYPE"]]
        assert num_rows <= comm.max_tokens
        return self._at(
            comm.arena[at] + comm.received + src * comm.received_bytes,
            wire_dtype,
            (num_rows, self._constants["HIDDEN"]),
        )

    def _send_sums(self, args: Any, dst: int) -> None:
        rows, slots, weights = self._terms(args, dst)
        sums = self._sums(args, dst, args.comm.rank, len(slots))
        has_term = (slots != -1).any(1)
        sums[has_term] = sum_partially(rows, slots, weights, sums.dtype)[has_term]

    def _add_sums(self, args: Any) -> None:
        rank = args.comm.rank
        rows, slots, weights = self._terms(args, rank)
        peers = [src for src in range(self._constants["NUM_RANKS"]) if src != rank]
        received = {src: self._sums(args, rank, src, len(slots)) for src in peers}
        # The twin rounds to the dtype of its rows; sums may also be wanted as they are accumulated.
        wide = rows.to(accumulation_dtype(rows.dtype))
        sums = combine_rows(wide, slots, weights, received, self._marks(args), rank)
        out_dtype = _ELEMENT_TYPES[self._constants["OUT_TYPE"]]
        self._at(args.out, out_dtype, sums.shape).copy_(sums.to(out_dtype))

    def _plan_forwarding(self, stream: Stream, args: Any) -> None:
        def plan() -> None:
            num_nodes, num_tokens, num_topk = args.num_nodes, args.num_tokens, self._constants["NUM_TOPK"]
            ids = self._at(args.topk_idx, _IDS[self._constants["ID_BYTES"]], (num_tokens, num_topk))
            dtype = _WEIGHTS.get(self._constants["WEIGHT_BYTES"])
            weights = self._at(args.topk_weights, dtype, ids.shape) if dtype else None
            table = torch.cat([self._at(args.expert_to_node, _I32, (args.num_experts,)).long(), torch.tensor([-1])])
            max_rows = args.max_rows if args.is_fixed else None
            sends_invalid_ids = bool(args.sends_invalid_ids)
            made = plan_forwarding(
                Routing(ids, weights), table, num_nodes, args.own_node, max_rows, sends_invalid_ids=sends_invalid_ids
            )
            self._at(args.node_to_tokens, _I32, made.plan.node_to_tokens.shape).copy_(made.plan.node_to_tokens)
            self._at(args.token_to_place, _I32, made.plan.token_to_place.shape).copy_(made.plan.token_to_place)
            for i, message in enumerate(made.messages):
                at, shape = args.messages + i * args.message_bytes, message.topk_idx.shape
                if message.topk_weights is not None:
                    self._at(at, dtype, shape).copy_(message.topk_weights)
                    at += message.topk_weights.nbytes
                self._at(at, _I32, shape).copy_(message.topk_idx)
            self._summarise(args, made.summary.tolist())

        stream.launch("counting rows for each node", plan)

    def _summarise(self, args: Any, counts: list[int]) -> None:
        summary, (*num_rows, bad_pair, bad_id) = self._at(args.summary, torch.int64, (2 * args.num_nodes + 1,)), counts
        for node, count in enumerate(num_rows):
            summary[node] = args.ticket << 32 | (bad_pair if node == args.own_node else count)
            if count > args.max_rows and args.is_overflow_reported and not summary[args.num_nodes + 1 + node]:
                summary[args.num_nodes + 1 + node] = count << 32 | args.max_rows
        summary[args.num_nodes] = bad_id

    def _node_barrier(self, stream: Stream, args: Any) -> None:
        words, rank, mine = self._words, args.comm.rank, [0]

        def come() -> None:
            words.barriers[rank] += 1
            mine[0] = words.barriers[rank]

        stream.launch("coming to a barrier", come)
        stream.launch("a barrier", lambda: None, lambda: min(words.barriers) >= mine[0])

    def _gather_rows(self, stream: Stream, args: Any) -> None:
        def gather() -> None:
            row_bytes, width = self._constants["ROW_BYTES"], self._constants["VECTOR_BYTES"]
            assert len(args.messages) == self._constants["NUM_MESSAGES"]
            for i, (message, at) in enumerate(zip(args.messages, args.places, strict=True)):
                num_rows = args.first_row[i + 1] - args.first_row[i]
                if not num_rows:
                    continue
                assert message % width == args.rows % width == 0, "an access that is not aligned"
                places = self._at(at, _I32, (num_rows,)).long()
                rows = self._at(args.rows, torch.uint8, (int(places.max()) + 1, row_bytes))
                filled = places >= 0
                self._at(message, torch.uint8, (num_rows, row_bytes))[filled] = rows[places[filled]]

        stream.launch("gathering rows", gather)

    def _copy_segments(self, stream: Stream, args: Any) -> None:
        def copy() -> None:
            src, dst, ends = self._at(args.segments, torch.int64, (3, args.num_segments))
            sizes = ends.diff(prepend=torch.zeros(1, dtype=torch.int64))
            for origin, to, size in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
                read = self._at(args.src + origin, torch.uint8, (size,))
                self._at(args.dst + to, torch.uint8, (size,)).copy_(read)

        stream.launch("copying segments", copy)

    def _quantize_rows(self, stream: Stream, args: Any) -> None:
        quantize = _FORMATS[self._constants["RULE"]](self._constants["BLOCK"], self._constants["SCALE_BYTES"])

        def quantise() -> None:
            dtype = _ELEMENT_TYPES[self._constants["ROW_TYPE"]]
            values, scales = quantize_rows(self._at(args.rows, dtype, (1, args.num_columns)), quantize)
            self._at(args.values, values.dtype, values.shape).copy_(values)
            self._at(args.scales, scales.dtype, scales.shape).copy_(scales)

        stream.launch("quantising rows", quantise)

    def _add_returned(self, stream: Stream, args: Any) -> None:
        def add() -> None:
            hidden = self._constants["HIDDEN"]
            dtype, wire_dtype = (_ELEMENT_TYPES[self._constants[name]] for name in ("ROW_TYPE", "WIRE_TYPE"))
            places = [self._at(address, _I32, (args.num_tokens,)) for address in args.places]
            returned = [
                self._at(address, wire_dtype, (int(of_node.max()) + 1, hidden))
                for address, of_node in zip(args.returned, places, strict=True)
            ]
            own = self._at(args.own, accumulation_dtype(dtype), (args.num_tokens, hidden))
            self._at(args.out, dtype, own.shape).copy_(add_returned(own, returned, places, dtype))

        stream.launch("adding returned sums", add)
