"""Peer-visible device memory of one rank, and the host-pinned flags for errors and aborts."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch

from fusco.control.connect import raise_if_any
from fusco.control.flags import Flags
from fusco.control.member_gather import Gather
from fusco.core.errors import SharedMemoryError
from fusco.cuda.gpu import Gpu
from fusco.cuda.kernels.abi import pinned
from fusco.cuda.kernels.comm import ABSENT_RANKS, Failure, Report, comm_type
from fusco.cuda.memory.layout import DeviceLayout

_NUM_STATE_WORDS = 16  # more than State of comm.cuh needs
_END_WAITS, _NETWORK_HAS_FAILED = 1, 2  # Abort of comm.cuh
_LOW_HALF = 0xFFFFFFFF


def allocate_on_all_ranks(store_gather: Gather, num_bytes: int, gpu: Gpu) -> torch.Tensor:
    """Return peer-visible memory, allocated on every rank; ``SharedMemoryError`` on all ranks if one cannot."""
    gpu.collect_garbage()  # memory that tracebacks have of arenas that could not be made
    memory, error = None, ""
    try:
        memory = gpu.allocate_visible(num_bytes)
    except SharedMemoryError as failure:
        error = str(failure)
    raise_if_any(store_gather, store_gather.all_gather("device memory", error))
    assert memory is not None
    return memory


class _Abort(ctypes.Structure):
    """A flag that kernels poll, in a word that compiled code can read."""

    _fields_ = (("value", ctypes.c_uint32), ("pad", ctypes.c_uint32))


class Arena:
    """Peer-visible ``memory`` laid out by a ``DeviceLayout``, private counters, and flags in host memory."""

    @classmethod
    def of(cls, layout: DeviceLayout, expert_bytes: int, store_gather: Gather, gpu: Gpu) -> Arena:
        """Allocate the layout's memory, and behind it ``expert_bytes``, on all ranks, and map it.

        No frame of a caller has that memory: a traceback would keep it, until some later capture of a graph.
        """
        memory = allocate_on_all_ranks(store_gather, layout.offsets["end"] + expert_bytes, gpu)
        return cls(layout, memory, store_gather, gpu)

    def __init__(self, layout: DeviceLayout, memory: torch.Tensor, store_gather: Gather, gpu: Gpu) -> None:
        """Map the arenas of the node; a collective of all ranks. ``memory`` is from ``allocate_on_all_ranks``.

        Raises ``SharedMemoryError`` on all ranks if one cannot map its peers'.
        """
        topology, device = layout.topology, memory.device
        self.rank, self.layout, self.device, self.memory = store_gather.rank, layout, device, memory
        self.gpu = gpu
        self.node_ranks = topology.node_to_ranks[topology.rank_to_node[self.rank]]
        self.local = topology.rank_to_local[self.rank]
        # It keeps the peers' memory mapped.
        self._handle = gpu.share(memory, store_gather, self.node_ranks, "peer memory")
        self._addresses: tuple[int, ...] = tuple(self._handle.buffer_ptrs)
        size = (layout.offsets["end"],)
        self._views: list[torch.Tensor] = [
            self._handle.get_buffer(r, size, torch.uint8) for r in range(layout.num_ranks)
        ]
        self._network_slots: dict[torch.dtype, torch.Tensor] = {}
        self._state = torch.zeros(_NUM_STATE_WORDS, dtype=torch.int32, device=device)
        self._pinned: list[torch.Tensor] = []
        self.failure, failure_address = self._in_host_memory(Failure)
        self._failure_words = Flags(self._pinned[-1])
        self.report, self.report_address = self._in_host_memory(Report)
        self._clear_report()
        self.plan_report = PlanReport(Flags(self._pinned[-1]))
        self._abort, abort_address = self._in_host_memory(_Abort)
        sections = {
            name: at
            for name, at in layout.offsets.items()
            if name not in ("exchanged", "pool", "rings", "slices", "end")
        }
        self.comm = comm_type(layout.num_ranks)(
            arena=self._addresses,
            state=self._state.data_ptr(),
            failure=failure_address,
            abort=abort_address,
            timeout_ns=int(layout.settings.timeout_s * 1e9),
            rank=self.local,
            max_tokens=layout.max_rows,
            max_topk=layout.capacity.num_topk,
            received_bytes=layout.received_bytes,
            has_network=topology.num_nodes > 1,
            **sections,
        )

    def address(self, local: int, offset: int) -> int:
        """Return the address, on this rank, of a byte in the arena of the node's rank ``local``."""
        return self._addresses[local] + offset

    def pooled_like(self, local: int, first: int, rows: torch.Tensor) -> torch.Tensor:
        """Return as many rows of the same shape from the pool of a rank of the node, where they begin at ``first``."""
        begin = self.layout.offsets["pool"] + first * rows.shape[1] * rows.element_size()
        return self._views[local][begin : begin + rows.nbytes].view(rows.dtype).view(rows.shape)

    def ring(self, producer: int, consumer: int) -> torch.Tensor:
        """Return the slots of the ring between two ranks of the node, one behind the other, in the producer's arena."""
        layout = self.layout
        return self._views[producer][layout.ring_offset(consumer, 0) :][: layout.ring_depth * layout.slot_bytes]

    def network_slots(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the slots of slices that this rank sends to other nodes, as rows of ``dtype``; not to be kept."""
        if dtype not in self._network_slots:
            layout, slots = self.layout, self.memory[self.layout.slice_offset(0) :]
            slots = slots[: layout.ring_depth * layout.network_slot_bytes].view(layout.ring_depth, -1)
            self._network_slots[dtype] = slots.view(dtype)
        return self._network_slots[dtype]

    def abort(self) -> None:
        """End every wait on this device soon. Any thread may call it, also during a graph capture."""
        self._abort.value = self._abort.value or _END_WAITS

    def abort_after_network(self) -> None:
        """End every wait on this device soon, and let kernels poison what depends on the network, which has failed."""
        self._abort.value = _NETWORK_HAS_FAILED

    def begin_again(self, absent: int) -> None:
        """Clear flags, epochs and reports, for the ranks of the node that are left; bit r of ``absent``: r is gone.

        All that are left call it after all of their work is complete, and launch nothing until all have called it and
        their devices have cleared what this launches.
        """
        at = self.layout.offsets
        self.memory[: at["ids"]].zero_()
        self.memory[at["end"] :].zero_()  # counts and their flags
        self._state.zero_()
        self._state[ABSENT_RANKS] = ctypes.c_int32(absent).value
        for each in (self.failure, self.report, self._abort):
            ctypes.memset(ctypes.addressof(each), 0, ctypes.sizeof(each))
        self._clear_report()

    def _clear_report(self) -> None:
        self.report.bad.src = self.report.bad_static.src = -1  # none

    @property
    def has_failed(self) -> bool:
        """True once a wait of the device has ended early; ``failure`` then says which."""
        return bool(self._failure_words.load(0) & 0xFFFFFFFF)

    @property
    def failure_addresses(self) -> tuple[int, int]:
        """Addresses of ``failure``, and of the flag that ``abort`` sets: a uint32, then four bytes that are zero."""
        return ctypes.addressof(self.failure), ctypes.addressof(self._abort)

    def _in_host_memory(self, kind: type[Any]) -> tuple[Any, int]:
        """Return a zeroed struct in pinned memory, and its address, which is the same on host and device."""
        size = -(-ctypes.sizeof(kind) // 8) * 8  # in words
        memory = pinned(torch.zeros(size, dtype=torch.uint8, device="cpu"), self.device)
        self._pinned.append(memory)
        return kind.from_address(memory.data_ptr()), memory.data_ptr()

    def close(self) -> None:
        """Release all device memory, now: no other object keeps a view of it. No work may be in flight."""
        self._views.clear()
        self._network_slots.clear()
        del self.memory, self._handle, self._state


class InvalidPair(NamedTuple):
    """An id that is not an expert, of a token of a rank; clamped to +-(2**31 - 1)."""

    src: int
    token: int
    k: int
    expert: int


class Overflow(NamedTuple):
    """A plan that needed more than there was: slots, or rows of one local expert."""

    needed: int
    limit: int
    local_expert: int | None


class PlanReport:
    """Reads and clears a ``Report``, a word of 8 bytes at a time: each has what the device writes last in its low half.

    A load that acquires it comes before those of what the device has written earlier, on any processor.
    """

    def __init__(self, words: Flags) -> None:
        self._words = words

    @property
    def ticket(self) -> int:
        """Number of the latest plan that has reported."""
        return self._words.load(0) & _LOW_HALF

    def num_slots(self, ticket: int) -> int | None:
        """Return the slots that the plan of a ticket needs; ``None`` unless it is the latest that has reported."""
        word = self._words.load(0)
        return word >> 32 if word & _LOW_HALF == ticket else None

    def take_invalid_pair(self, *, is_static: bool) -> InvalidPair | None:
        """Return and clear the first invalid id: of a plan that the host waits for, or of those into static rows."""
        at = (Report.bad_static if is_static else Report.bad).offset // 8
        first = self._words.load(at)
        if first & _LOW_HALF == _LOW_HALF:
            return None
        second = self._words.load(at + 1)
        self._words.store(at, -1)  # the device may write another one now
        return InvalidPair(first & _LOW_HALF, first >> 32, second & _LOW_HALF, second >> 32)

    def take_overflow(self) -> Overflow | None:
        """Return and clear the first overflow."""
        at = Report.overflow_needed.offset // 8
        word = self._words.load(at)
        if not word & _LOW_HALF:
            return None
        number = self._words.load(Report.begun.offset // 8) >> 32  # overflow_expert
        self._words.store(at, 0)  # the device may write another one now
        return Overflow(word & _LOW_HALF, word >> 32, number - 1 if number else None)
