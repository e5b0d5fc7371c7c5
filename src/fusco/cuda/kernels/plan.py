"""The kernel ``plan``: assign the rows of a node's ranks to slots on this rank."""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeAlias

import torch

from fusco.cuda.kernels.abi import CHUNK_PAIRS, I32, POINTER, U64, WARP_SIZE, Memory, Number, address, struct
from fusco.cuda.kernels.comm import comm_type
from fusco.cuda.kernels.held_rows import HeldRows, RowAddresses
from fusco.cuda.kernels.launcher import KernelCall, Launcher, PreparedLaunch
from fusco.cuda.kernels.spares import SpareLimit, Spares, num_together
from fusco.cuda.tuning import PLAN_THREADS, plan_shape

# For each rank of the node, the rows that it holds, in order: source, first, end.
Runs: TypeAlias = Sequence[Sequence[tuple[int, int, int]]]


class PublishedRouting(NamedTuple):
    """Routing of a source that this rank publishes in its node: ids and weights (num_rows, num_topk), contiguous.

    Ids of this rank are int32 or int64, those of other nodes int32.
    """

    source: int
    topk_idx: Memory
    topk_weights: Memory | None


@dataclass(frozen=True, kw_only=True)
class PlanTables:
    """Tables for all plans of a rank."""

    # int32 (num_experts,), the index among this rank's experts; -1 for experts of other ranks
    expert_to_local: torch.Tensor
    expert_to_rank: torch.Tensor  # int32 (num_experts,), the index in the node; -1 for experts of other nodes
    publishers: tuple[int, ...]  # for each source, the rank of the node that publishes its routing
    num_local_experts: int  # experts of this rank
    run_counts: torch.Tensor  # int32 (num_sms * num_local_experts,), scratch
    report: int  # the address of a ``Report``
    # int32 (num_local_experts,) in host memory: rows of each local expert, part of a report
    reported_counts: torch.Tensor


class PlanTerms(NamedTuple):
    """Output layout of a plan, and its launch."""

    expert_alignment: int  # each block is rounded up to a multiple of this
    max_slots: int  # slots of the output
    is_overflow_reported: bool  # True if more rows than slots are an error
    num_sms: int | None  # maximum number of SMs; ``None`` means those of the device
    rows_per_expert: int = 0  # slots of each expert, if they have a fixed number
    is_followed_early: bool = False  # True if the next kernel pushes rows while this one waits for ranks


@dataclass(frozen=True)
class PlanShape:
    """Sizes of a plan's tensors, and their byte offsets in one allocation, each a multiple of 16."""

    num_rows: int
    num_held_rows: int
    num_topk: int
    num_local_experts: int
    weight_dtype: torch.dtype | None

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Offset of each tensor; ``"end"`` is the total size."""
        num_pairs = self.num_rows * self.num_topk
        sizes = {
            "num_rows_per_expert": 8 * self.num_local_experts,
            "weights": num_pairs * self.weight_bytes,
            "row_to_slots": 4 * num_pairs,
            "block_to_first_slot": 4 * (3 * self.num_local_experts + 1),
            "token_to_ranks": 4 * self.num_held_rows,
        }
        aligned = (-(-size // 16) * 16 for size in sizes.values())
        return dict(zip((*sizes, "end"), itertools.accumulate(aligned, initial=0), strict=True))

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight; 0 without weights."""
        return self.weight_dtype.itemsize if self.weight_dtype else 0


class PlanAddresses:
    """Addresses of a plan's tensors, of a shape, from that of the first on."""

    def __init__(self, shape: PlanShape, address: Number) -> None:
        self.shape, self.address = shape, address

    @property
    def addresses(self) -> RowAddresses:
        """Addresses of what kernels read of all rows."""
        weights = self.address_of("weights") if self.shape.weight_dtype else 0
        return RowAddresses(self.address_of("row_to_slots"), weights, self.address_of("token_to_ranks"))

    def behind(self, offsets: tuple[int, int, int]) -> RowAddresses:
        """Return ``addresses`` plus offsets in bytes."""
        return RowAddresses(*map(operator.add, self.addresses, offsets))

    def address_of(self, name: str) -> Number:
        """Return the address of a tensor."""
        return self.address + self.shape.offsets[name]


class PlanTensors(PlanAddresses):
    """Tensors of a plan in one run of memory, made when first used: kernels need none.

    ``row_to_slots`` and ``weights`` are in order of source, ``token_to_ranks`` in order of ``PlannedRows.held``; see
    ``RowAddresses``. ``block_to_first_slot`` has the first slot of each local expert's block, ``block_to_end_slot`` its
    end with the padding of zeros: int32 (num_local_experts,).

    Attributes:
        shape: sizes and offsets.
        memory: int64; has this plan's tensors, and perhaps those of others.
        address: of the first.
        num_rows_per_expert: rows of each local expert, int64 (num_local_experts,), padding not counted.
    """

    address: int

    def __init__(
        self, shape: PlanShape, memory: torch.Tensor, first: int = 0, counts: torch.Tensor | None = None
    ) -> None:
        """Place the tensors behind the first elements of the memory; ``counts`` are ``num_rows_per_expert``."""
        self.shape, self.memory, self._first = shape, memory, first
        self.address = memory.data_ptr() + 8 * first
        self.num_rows_per_expert = memory[first : first + shape.num_local_experts] if counts is None else counts

    @classmethod
    def of(cls, shape: PlanShape, device: torch.device) -> PlanTensors:
        """Return the tensors of one plan, in memory of their own."""
        return cls(shape, torch.empty(shape.offsets["end"] // 8, dtype=torch.int64, device=device))

    @cached_property
    def row_to_slots(self) -> torch.Tensor:
        return self._view("row_to_slots", torch.int32, (self.shape.num_rows, self.shape.num_topk))

    @cached_property
    def weights(self) -> torch.Tensor | None:
        dtype, shape = self.shape.weight_dtype, (self.shape.num_rows, self.shape.num_topk)
        return self._view("weights", dtype, shape) if dtype else None

    @cached_property
    def block_to_first_slot(self) -> torch.Tensor:
        return self._blocks[: self.shape.num_local_experts]

    @cached_property
    def block_to_end_slot(self) -> torch.Tensor:
        return self._blocks[self.shape.num_local_experts : 2 * self.shape.num_local_experts]

    @cached_property
    def num_dropped_per_expert(self) -> torch.Tensor:
        return self._blocks[2 * self.shape.num_local_experts : -1]

    @cached_property
    def num_rows_needed(self) -> torch.Tensor:
        return self._blocks[-1:]

    @property
    def _blocks(self) -> torch.Tensor:
        return self._view("block_to_first_slot", torch.int32, (3 * self.shape.num_local_experts + 1,))

    @cached_property
    def token_to_ranks(self) -> torch.Tensor:
        return self._view("token_to_ranks", torch.int32, (self.shape.num_held_rows,))

    def _view(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        first = (8 * self._first + self.shape.offsets[name]) // dtype.itemsize
        return self.memory.view(dtype)[first : first + math.prod(shape)].view(shape)


class PlanMemory(Spares[PlanTensors]):
    """Memory for plans of one shape."""

    def __init__(self, shape: PlanShape, device: torch.device, limit: SpareLimit) -> None:
        super().__init__(limit)
        self._shape, self._device = shape, device

    def _allocate(self) -> list[PlanTensors]:
        size, num_local = self._shape.offsets["end"] // 8, self._shape.num_local_experts
        memory = torch.empty(num_together(8 * size), size, dtype=torch.int64, device=self._device)
        # Callers of dispatch get the counts, and a slice of memory takes as long as half a launch: all at once.
        all_counts, memory = memory[:, :num_local].unbind(), memory.view(-1)
        return [PlanTensors(self._shape, memory, i * size, counts) for i, counts in enumerate(all_counts)]


@dataclass
class PlannedRows:
    """Plan as the kernel fills it. A *source* is a rank of any node, its rows are those of its tokens on this node."""

    tables: PlanAddresses  # the tensors
    # ``world_size + 1`` entries; source ``s`` has rows ``first_row[s]`` to ``first_row[s + 1]``. The tokens of this
    # node's ranks are all there, of other ranks only those that concern this node
    first_row: tuple[int, ...]
    held: tuple[int, ...]  # the sources with rows in this rank's pool; this rank first
    num_topk: int  # experts per token (top-k)

    def at(self, address: Number) -> PlannedRows:
        """Return the same with tensors that begin at another address."""
        return planned_at(self.first_row, self.held, self.tables.shape, address)

    def num_rows_of(self, source: int) -> int:
        """Return the rows of a source."""
        return self.first_row[source + 1] - self.first_row[source]

    def run_of(self, runs: Runs, local: int) -> HeldRows | None:
        """Return some of the rows, if they follow each other; ``local`` is this rank's index in the node."""
        joined, marks = self.joined(runs, local)
        if len(joined) > 1 or len(marks) > 1:
            return None
        begin, mark = (of[0][0] if of else 0 for of in (joined, marks))
        first_pair, weight_bytes = begin * self.num_topk, self.tables.shape.weight_bytes
        addresses = self.tables.behind((4 * first_pair, weight_bytes * first_pair, 4 * mark))
        return HeldRows(ends_of(runs), addresses, self.num_topk, weight_bytes)

    def joined(self, runs: Runs, local: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return first and end of runs of some of the rows: in ``row_to_slots``, and in ``token_to_ranks``."""
        before = dict(zip(self.held, itertools.accumulate(map(self.num_rows_of, self.held), initial=0), strict=False))
        pieces = ((self.first_row[src], first, end) for of_rank in runs for src, first, end in of_rank)
        marks = ((before[src], first, end) for src, first, end in runs[local])
        return _joined(pieces), _joined(marks)

    @property
    def all_rows(self) -> HeldRows:
        """All rows, in order of source; with one node, ranks hold them so."""
        return HeldRows(self.first_row, self.tables.addresses, self.num_topk, self.tables.shape.weight_bytes)


def ends_of(runs: Runs) -> tuple[int, ...]:
    """Return 0 and the numbers of rows of the first rank, of the first two, ...

    >>> ends_of([[(0, 2, 5), (3, 0, 1)], [], [(1, 0, 2)]])
    (0, 4, 4, 6)
    """
    return (0, *itertools.accumulate(sum(end - first for _, first, end in of_rank) for of_rank in runs))


def _joined(pieces: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Return the runs, first and end, of pieces that follow each other; empty pieces are left out.

    A piece has the place of its source's rows, and the first and the end of them.

    >>> _joined([(0, 2, 4), (0, 4, 4), (9, 0, 0), (4, 0, 3), (4, 4, 5)])
    [(2, 7), (8, 9)]
    """
    runs: list[tuple[int, int]] = []
    for first, end in ((place + begin, place + end) for place, begin, end in pieces):
        if first == end:
            continue
        if runs and runs[-1][1] == first:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((first, end))
    return runs


def planned_at(first_row: tuple[int, ...], held: tuple[int, ...], shape: PlanShape, address: Number) -> PlannedRows:
    """Return a plan whose tensors begin at an address."""
    return PlannedRows(PlanAddresses(shape, address), first_row, held, shape.num_topk)


@cache
def plan_type(num_ranks: int, num_nodes: int = 1) -> type[ctypes.Structure]:
    """``PlanArgs`` of plan.cu."""
    num_sources = num_ranks * num_nodes
    return struct(
        "PlanArgs",
        (comm_type(num_ranks), "comm"),
        (POINTER * num_nodes, "topk_idx topk_weights"),
        (POINTER, "expert_to_local expert_to_rank row_to_slots row_weights num_rows_per_expert block_to_first_slot"),
        (POINTER, "token_to_ranks run_counts reported_counts report"),
        (U64, "ticket"),
        (I32 * (num_sources + 1), "first_row"),
        (I32 * num_sources, "publishers"),
        (I32 * num_nodes, "published"),
        (I32 * (num_sources - num_ranks + 1), "held"),
        (I32, "num_held num_experts num_local_experts expert_alignment max_slots rows_per_expert is_overflow_reported"),
        (I32, "is_followed_early"),
    )


def plan_shared_bytes(num_local_experts: int, num_threads: int = PLAN_THREADS) -> int:
    """Return the shared memory of a block in bytes: per expert, a count of each warp, prefix, total, and first slot."""
    return 4 * ((num_threads // WARP_SIZE + 3) * num_local_experts + 1)


def plan_slots(
    launcher: Launcher,
    tables: PlanTables,
    plan: PlannedRows,
    published: Sequence[PublishedRouting],
    terms: PlanTerms,
    ticket: Number,
) -> KernelCall:
    """Exchange routing within the node, and fill the plan's tensors.

    ``plan`` has the sizes, and tensors for the results. ``published`` has an entry for each node. ``ticket`` is the
    number of the report; 0 if the host does not wait for it.
    """
    ids, made = published[0].topk_idx, plan.tables
    key = ("plan", plan.first_row, plan.held, plan.num_topk, ids.element_size(), made.shape.weight_bytes, *terms)
    prepared = launcher.prepared.use(key) or _prepare(launcher, tables, plan, published, terms, key)
    row_to_slots, row_weights, token_to_ranks = made.addresses
    return KernelCall(
        prepared,
        {
            "topk_idx": [routing.topk_idx.data_ptr() for routing in published],
            "topk_weights": [address(routing.topk_weights) for routing in published],
            "row_to_slots": row_to_slots,
            "row_weights": row_weights,
            "token_to_ranks": token_to_ranks,
            "num_rows_per_expert": made.address_of("num_rows_per_expert"),
            "block_to_first_slot": made.address_of("block_to_first_slot"),
            "ticket": ticket,
        },
    )


def _prepare(
    launcher: Launcher,
    tables: PlanTables,
    plan: PlannedRows,
    published: Sequence[PublishedRouting],
    terms: PlanTerms,
    key: tuple[Any, ...],
) -> PreparedLaunch:
    num_nodes, num_topk = len(published), plan.num_topk
    arguments = plan_type(launcher.num_ranks, num_nodes)(
        comm=launcher.comm,
        expert_to_local=tables.expert_to_local.data_ptr(),
        expert_to_rank=tables.expert_to_rank.data_ptr(),
        run_counts=tables.run_counts.data_ptr(),
        report=tables.report,
        reported_counts=tables.reported_counts.data_ptr(),
        first_row=plan.first_row,
        publishers=tables.publishers,
        published=tuple(routing.source for routing in published),
        held=plan.held,
        num_held=len(plan.held),
        num_experts=len(tables.expert_to_local),
        num_local_experts=tables.num_local_experts,
        expert_alignment=terms.expert_alignment,
        max_slots=terms.max_slots,
        rows_per_expert=terms.rows_per_expert,
        is_overflow_reported=terms.is_overflow_reported,
        is_followed_early=terms.is_followed_early,
    )
    constants = {
        "NUM_NODES": num_nodes,
        "NUM_TOPK": num_topk,
        "ID_BYTES": published[0].topk_idx.element_size(),
        "WEIGHT_BYTES": plan.tables.shape.weight_bytes,
        "CHUNK_PAIRS": CHUNK_PAIRS,
    }
    num_threads, num_blocks = plan_shape(plan.first_row[-1] * num_topk)
    if plan_shared_bytes(tables.num_local_experts, num_threads) > launcher.library.max_shared_bytes:
        num_threads = PLAN_THREADS
    grid = max(1, min(launcher.sms(terms.num_sms), num_blocks))
    shared_bytes = plan_shared_bytes(tables.num_local_experts, num_threads)
    return launcher.prepare(key, constants, arguments, grid=grid, num_threads=num_threads, shared_bytes=shared_bytes)
