"""The CUDA engine: one rank's part in every verb, as kernels on a stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from fusco.engine.base import Delivery, DispatchOrder, ExchangeOrder
from fusco.engine.cuda.arena import Arena, allocate_visible
from fusco.engine.cuda.failure import stall_of
from fusco.engine.cuda.kernels import Kernels, Payload
from fusco.engine.cuda.plan import DevicePlan
from fusco.engine.cuda.streams import DeviceStreams
from fusco.engine.host.connect import connect
from fusco.engine.host.rounds import Rounds
from fusco.engine.profile import CallProfile
from fusco.engine.record import Agreement, Record
from fusco.engine.stream import check_sizes, exchange_all, stream_sizes, stream_with
from fusco.engine.tasks import run
from fusco.errors import RejectedInputError, SharedMemoryError, SlotOverflowError, Stall
from fusco.kernels.cuda.library import Library
from fusco.launch import Launch
from fusco.memory.device_layout import DeviceLayout
from fusco.memory.layout import ArenaLayout
from fusco.placement import ExpertPlacement
from fusco.planner.routing import Routing, describe_stranger
from fusco.segments import Segments
from fusco.topology import Topology
from fusco.transport.roll_call import RollCall

_NO_LIMIT = 2**31 - 1
_MAX_TOPK, _MAX_RANKS = 32, 32  # a lane of a warp for each expert of a token, a bit of a word for each rank
_STAGED = (-1, 0)  # rows that peers read in the pool
_IN_VAIN = "its device waited in vain"
# How long a rank looks without pause for what its peers' processes and its device are about to say.
_SPIN_S = 500e-6


class CudaEngine:
    """See ``fusco.engine.base.Engine``."""

    def __init__(
        self,
        roll: RollCall,
        layout: ArenaLayout,
        hosts: Sequence[str],
        listen_on: str,
        placement: ExpertPlacement,
        device: torch.device,
    ) -> None:
        """Connect to all other ranks and map their arenas; for the arguments see ``connect``."""
        self._topology, self._rank, self._device = layout.topology, roll.rank, device
        if layout.capacity.num_topk > _MAX_TOPK or roll.world_size > _MAX_RANKS:
            raise ValueError(
                f"device 'cuda' takes at most {_MAX_TOPK} experts a token and {_MAX_RANKS} ranks, got "
                f"num_topk={layout.capacity.num_topk} and {roll.world_size} ranks"
            )
        if self._topology.num_nodes > 1:
            raise ValueError(
                f"device 'cuda' works within one node so far, but there are {self._topology.num_nodes}: "
                f"{self._topology.node_to_ranks}"
            )
        self._wire_dtype, self._placement = layout.settings.wire_dtype, placement
        # Records and words for byte streams stand in host memory; rows never do.
        self._connections = connect(roll, layout.without_rows(), hosts, listen_on)
        self._watch = self._connections.watch
        self._watch.spin_s = _SPIN_S
        with torch.cuda.device(device):
            device_layout = DeviceLayout(roll.world_size, layout.capacity, layout.settings)
            memory = _allocate_together(roll, device_layout.offsets["end"], device)
            self._arena = Arena(device_layout, memory, roll)
            self._library = Library(device)
            self._kernels = Kernels(self._library, self._arena, placement)
            self._own_stream, self._staging_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._may_stage, self._has_staged, self._done = (torch.cuda.Event() for _ in range(3))
            self._streams = DeviceStreams(self._connections.memory, self._arena, self._kernels, device)
        self._rounds = Rounds(roll.rank, self._connections, self._arena.abort)
        self._watch.device_stall = self._device_stall
        self._num_plans = 0
        self._latest_stream: torch.cuda.Stream | None = None
        torch.cuda.synchronize(device)  # whichever stream the first verb runs on
        roll.gather("arena", "")  # nobody writes to an arena that its owner has not cleared

    @property
    def profile(self) -> CallProfile:
        """See ``Engine``. Times are the host's: what it took to launch."""
        profile = self._rounds.profile
        profile.num_sms = self._kernels.num_sms
        return profile

    @property
    def topology(self) -> Topology:
        """See ``Engine``."""
        return self._topology

    @property
    def num_collectives(self) -> int:
        """See ``Engine``."""
        return self._rounds.number

    @contextmanager
    def collective(self, operation: str) -> Iterator[None]:
        """See ``Engine``."""
        with self._rounds.collective(operation):
            if waited_in_vain := self._device_stall():
                self._watch.find_fault(waited_in_vain, _IN_VAIN)
            yield

    def pending_error(self) -> Exception | None:
        """See ``Engine``."""
        report = self._arena.report
        if report.bad_src >= 0:  # from a dispatch into static slots, which did not wait to see
            reason = describe_stranger(report.bad_token, report.bad_k, report.bad_id, self._placement.num_experts)
            bad_src, report.bad_src = report.bad_src, -1
            return ValueError(f"in an earlier dispatch into static slots, rank {bad_src} gave {reason}")
        if not report.overflow_needed:
            return None
        error = SlotOverflowError(self._rank, report.overflow_limit, report.overflow_needed)
        report.overflow_needed = 0
        return error

    def agree(self, agreement: Agreement) -> None:
        """See ``Engine``."""
        self._rounds.publish(agreement, [])

    def dispatch(self, agreement: Agreement, order: DispatchOrder | None) -> Delivery | None:
        """See ``Engine``."""
        if order is None or agreement.rejection:
            self._rounds.publish(agreement, [0, *_STAGED])
            return None
        with self._on_stream(order.launch, *order.payloads, order.routing.topk_idx, order.routing.topk_weights):
            payloads = [_plain(payload) for payload in order.payloads]
            records = self._rounds.publish(agreement, [order.routing.num_tokens, *self._place_of(payloads)])
            with self._staging(payloads, records, order.launch):
                plan = self._make_plan(order, records)
                if not order.static:
                    plan = self._size_exactly(plan)
                rows = self._scatter(plan, payloads, records, order.launch)
        self._hand_over([*rows, *plan.tensors], order.launch)
        return Delivery(plan, rows, None if order.static else self._rejection_of(order.routing))

    def dispatch_along(
        self, agreement: Agreement, plan: DevicePlan, payloads: Sequence[torch.Tensor], launch: Launch
    ) -> list[torch.Tensor] | None:
        """See ``Engine``."""
        if agreement.rejection:
            self._rounds.publish(agreement, [0, *_STAGED])
            return None
        with self._on_stream(launch, *payloads):
            plain = [_plain(payload) for payload in payloads]
            records = self._rounds.publish(agreement, [plan.num_tokens, *self._place_of(plain)])
            with self._staging(plain, records, launch):
                rows = self._scatter(plan, plain, records, launch)
        self._hand_over(rows, launch)
        return rows

    def combine(
        self, agreement: Agreement, plan: DevicePlan, rows: torch.Tensor, weights: torch.Tensor | None, launch: Launch
    ) -> torch.Tensor | None:
        """See ``Engine``."""
        self._rounds.publish(agreement, [])
        if agreement.rejection:
            return None
        with self._on_stream(launch, rows), self.profile.spend("wire"):
            plain = _plain(rows)
            out = plain.new_empty(plan.num_tokens, plain.shape[1])
            wire_dtype = torch.promote_types(plain.dtype, self._wire_dtype or plain.dtype)
            self._kernels.combine(plan, plain, weights, wire_dtype, out, launch.num_sms)
        self._hand_over([out], launch)
        return out

    def shuffle(self, agreement: Agreement, send: Mapping[int, Segments], receive: Mapping[int, Segments]) -> None:
        """See ``Engine``. Returns when everything has arrived."""
        world_size = self._topology.world_size
        records = self._rounds.publish(agreement, stream_sizes(send, receive, world_size))
        if agreement.rejection:
            return
        check_sizes(records, world_size)
        with self._on_stream(Launch()), self.profile.spend("wire"):
            exchange_all(self._streams, self._rank, send, receive, self._watch)

    def all_to_all(self, agreement: Agreement, exchange: ExchangeOrder | None) -> None:
        """See ``Engine``. Not there yet: all ranks raise ``ValueError``, and go on."""
        self._rounds.publish(agreement, [])
        if exchange is not None:
            raise RejectedInputError(
                "all_to_all on CUDA is not there yet: use a communicator with device='cpu', or shuffle"
            )

    def gather_send(self, segments: Segments, dst: int) -> None:
        """See ``Engine``. Returns when everything has arrived."""
        with self._stream_with(dst, f"gather_send to rank {dst}", segments):
            run([self._streams.outgoing(segments, dst)], self._watch)

    def scatter_recv(self, segments: Segments, src: int) -> None:
        """See ``Engine``. Returns when everything has arrived."""
        with self._stream_with(src, f"scatter_recv from rank {src}", segments):
            run([self._streams.incoming(segments, src)], self._watch)

    def empty(self, agreement: Agreement, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """See ``Engine``."""
        num_bytes, memory, error = torch.Size(shape).numel() * dtype.itemsize, None, None
        if not agreement.rejection:
            try:
                memory = allocate_visible(num_bytes, self._device)
            except SharedMemoryError as failure:
                error, agreement = failure, replace(agreement, rejection=str(failure))
        self._rounds.publish(agreement, [])
        if error:
            raise error
        if memory is None:
            return None
        self._arena.share(memory)
        return memory[:num_bytes].view(dtype).view(shape)

    def wait(self) -> None:
        """See ``Engine``."""
        if self._latest_stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._latest_stream)

    def synchronize(self) -> None:
        """See ``Engine``."""
        if self._latest_stream is None or self._rounds.broken:
            return
        self.wait()  # graphs are replayed on the current stream, everything else was launched on the latest
        self._done.record(torch.cuda.current_stream(self._device))
        with self._rounds.operation("synchronize"):
            peers = tuple(rank for rank in range(self._topology.world_size) if rank != self._rank)
            stall = Stall("waiting for the own device", peers, "everything launched to be done", "work under way")
            self._watch.wait_until(self._done.query, lambda: stall)
            if waited_in_vain := self._device_stall():
                self._watch.find_fault(waited_in_vain, _IN_VAIN)

    def abandon(self, reason: str) -> None:
        """See ``Engine``."""
        self._rounds.abandon(reason)

    def close(self) -> None:
        """See ``Engine``."""
        self._rounds.end("it is closed")
        # Kernels that wait for a peer see the call to abort; whatever else is under way is short.
        torch.cuda.synchronize(self._device)
        self._arena.close()
        self._connections.close()

    def _make_plan(self, order: DispatchOrder, records: Sequence[Record]) -> DevicePlan:
        routing, device = order.routing, self._device
        first_row = (0, *itertools.accumulate(record.counts[0] for record in records))
        shape = (first_row[-1], routing.num_topk)
        num_local = len(self._placement.rank_to_experts[self._rank])
        weights = routing.topk_weights
        plan = DevicePlan(
            rank=self._rank,
            placement=self._placement,
            first_row=first_row,
            num_slots=order.static.num_slots if order.static else 0,
            row_to_slots=torch.empty(shape, dtype=torch.int32, device=device),
            weights=None if weights is None else torch.empty(shape, dtype=weights.dtype, device=device),
            num_rows_per_expert=torch.empty(num_local, dtype=torch.int64, device=device),
            block_to_first_slot=torch.empty(num_local + 1, dtype=torch.int32, device=device),
            token_to_ranks=torch.empty(routing.num_tokens, dtype=torch.int32, device=device),
        )
        self._num_plans += 1
        self._kernels.plan(
            plan,
            routing.topk_idx.contiguous(),
            None if weights is None else weights.detach().contiguous(),
            expert_alignment=order.expert_alignment,
            is_overflow_reported=order.static is not None and order.static.on_overflow == "raise",
            max_slots=order.static.num_slots if order.static else _NO_LIMIT,
            ticket=0 if order.static else self._num_plans,
            num_sms=order.launch.num_sms,
        )
        return plan

    def _size_exactly(self, plan: DevicePlan) -> DevicePlan:
        """Wait until the plan is made, for the one number that the host needs."""
        report, ticket = self._arena.report, self._num_plans
        peers = tuple(rank for rank in range(self._topology.world_size) if rank != self._rank)
        stall = Stall("planning on the device", peers, "the plan", "none yet")
        self._watch.wait_until(lambda: report.ticket == ticket, lambda: stall)
        return replace(plan, num_slots=report.num_slots)

    def _rejection_of(self, routing: Routing) -> Exception | None:
        """What is wrong with an id that is no expert: for whoever gave it a ``ValueError``, and all others know."""
        report = self._arena.report
        src = report.bad_src
        if src < 0:
            return None
        report.bad_src = -1
        num_experts = self._placement.num_experts
        token, k = report.bad_token, report.bad_k
        if src == self._rank:
            return ValueError(describe_stranger(token, k, int(routing.topk_idx[token, k]), num_experts))
        reason = describe_stranger(token, k, report.bad_id, num_experts)
        return RejectedInputError(
            f"dispatch was called off on all ranks, since rank {src} rejected its input: {reason}"
        )

    def _place_of(self, payloads: Sequence[torch.Tensor]) -> tuple[int, int]:
        return self._arena.place_of(payloads[0]) if len(payloads) == 1 and payloads[0].numel() else _STAGED

    @contextmanager
    def _staging(self, payloads: Sequence[torch.Tensor], records: Sequence[Record], launch: Launch) -> Iterator[None]:
        """Copy rows to where peers read them, beside what is launched inside; rows in place stay where they are."""
        if records[self._rank].counts[1] != _STAGED[0]:
            yield
            return
        moved = [Payload(address=payload.data_ptr(), row_bytes=_row_bytes(payload)) for payload in payloads]
        num_tokens, sizes = len(payloads[0]), [payload.row_bytes for payload in moved]
        offsets = [self._arena.layout.pool_offset(num_tokens, sizes, p) for p in range(len(moved))]
        pools = [self._arena.address(self._rank, 0, offset) for offset in offsets]
        assert self._latest_stream is not None
        self._may_stage.record(self._latest_stream)
        self._staging_stream.wait_event(self._may_stage)
        self._kernels.stage(moved, pools, num_tokens, launch.num_sms, self._staging_stream.cuda_stream)
        yield
        self._has_staged.record(self._staging_stream)
        self._latest_stream.wait_event(self._has_staged)

    def _scatter(
        self,
        plan: DevicePlan,
        payloads: Sequence[torch.Tensor],
        records: Sequence[Record],
        launch: Launch,
    ) -> list[torch.Tensor]:
        outputs = [payload.new_empty(plan.num_slots, *payload.shape[1:]) for payload in payloads]
        moved = [
            Payload(address=payload.data_ptr(), row_bytes=_row_bytes(payload), output_address=output.data_ptr())
            for payload, output in zip(payloads, outputs, strict=True)
        ]
        sizes = [payload.row_bytes for payload in moved]
        rows, in_place_ranks = [], 0
        for rank, record in enumerate(records):
            num_tokens, buffer, offset = record.counts
            if rank == self._rank:
                rows.append([payload.address for payload in moved])
            elif buffer != _STAGED[0]:
                rows.append([self._arena.address(rank, buffer, offset)])
            else:
                starts = [self._arena.layout.pool_offset(num_tokens, sizes, p) for p in range(len(sizes))]
                rows.append([self._arena.address(rank, 0, start) for start in starts])
            in_place_ranks |= (buffer != _STAGED[0]) << rank
        self._kernels.scatter(plan, moved, rows, in_place_ranks, launch.num_sms)
        return outputs

    def _hand_over(self, outputs: Sequence[torch.Tensor], launch: Launch) -> None:
        """What was made on the own stream will be used on the caller's."""
        if launch.own_stream:
            for output in outputs:
                output.record_stream(torch.cuda.current_stream(self._device))

    def _device_stall(self) -> Stall | None:
        failure = self._arena.failure
        return stall_of(failure) if failure.is_set else None

    @contextmanager
    def _stream_with(self, peer: int, name: str, segments: Segments) -> Iterator[None]:
        with self._rounds.operation(name), self._on_stream(Launch()):
            self._watch.begin(self._rounds.number, name)
            with stream_with(self._streams, peer, name, segments, self._watch):
                yield

    @contextmanager
    def _on_stream(self, launch: Launch, *inputs: torch.Tensor | None) -> Iterator[None]:
        """Launch on the caller's stream or the own one, after everything launched before."""
        callers = torch.cuda.current_stream(self._device)
        stream = self._own_stream if launch.own_stream else callers
        if stream != callers:
            stream.wait_stream(callers)
            for tensor in inputs:
                if tensor is not None:
                    tensor.record_stream(stream)  # the caller may let go of it before it is read
        if self._latest_stream not in (None, stream) and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._latest_stream)
        self._latest_stream = stream
        self._kernels.stream, self._kernels.num_sms = stream.cuda_stream, 0
        if stream == callers and torch.cuda.current_device() == self._device.index:
            yield
            return
        with torch.cuda.stream(stream):
            yield


def _allocate_together(roll: RollCall, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Peer-visible memory on every rank, or ``SharedMemoryError`` on all of them."""
    memory, error = None, ""
    try:
        memory = allocate_visible(num_bytes, device)
    except SharedMemoryError as failure:
        error = str(failure)
    failed = [f"rank {rank}: {why}" for rank, why in enumerate(roll.gather("device memory", error)) if why]
    if failed:
        raise SharedMemoryError("; ".join(failed))
    assert memory is not None
    return memory


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous and aligned for 16-byte accesses."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain if plain.data_ptr() % 16 == 0 else plain.clone()


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[1:].numel() * rows.element_size()
