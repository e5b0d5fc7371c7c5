"""The CUDA engine: one rank's part in every verb, as kernels on a stream."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from fusco.control.connect import connect, raise_if_any
from fusco.control.fingerprint import Agreement
from fusco.control.keeping import keep_for_good
from fusco.control.layout import ArenaLayout
from fusco.control.session import Rounds
from fusco.control.store_gather import RollCall
from fusco.core.errors import SharedMemoryError, SlotOverflowError, Stall
from fusco.core.launch import Launch
from fusco.core.placement import ExpertPlacement
from fusco.core.profile import CallProfile
from fusco.core.rows import aligned, row_bytes
from fusco.core.segments import Segments
from fusco.core.timeline import NoTimeline, Timeline
from fusco.core.topology import Topology
from fusco.cuda.all_to_all import LINKS, RoundsOfMessages
from fusco.cuda.arena import Arena, allocate_visible
from fusco.cuda.byte_streams import DeviceStreams
from fusco.cuda.context import Kernels
from fusco.cuda.failure import own_backlog, stall_of
from fusco.cuda.internode import InternodeShuffle
from fusco.cuda.intranode import STAGED, NodeShuffle
from fusco.cuda.kernels.library import Library
from fusco.cuda.kernels.plan import plan_shared_bytes
from fusco.cuda.last_work import LastWork
from fusco.cuda.layout import DeviceLayout
from fusco.cuda.network import Network
from fusco.cuda.stream_order import StreamOrder
from fusco.engine.base import Delivery, DispatchOrder, ExchangeOrder
from fusco.engine.byte_stream import check_sizes, stream_sizes, stream_with
from fusco.engine.exchange_plan import agree_on_exchange
from fusco.engine.tasks import run
from fusco.planner.routing import describe_stranger

_MAX_TOPK, _MAX_RANKS = 32, 32  # a lane of a warp for each expert of a token, a bit of a word for each rank
_IN_VAIN = "its device waited in vain"
# How long a rank looks without pause for what its peers' processes and its device are about to say: as long as hosts
# may be ahead of their devices in training. With pauses a device may stand idle for half a millisecond.
_SPIN_S = 50e-3
_ENDING = 0.5  # of the limit, for what was launched to end before its memory is given back


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
        if layout.capacity.num_topk > _MAX_TOPK or self._topology.ranks_per_node > _MAX_RANKS:
            raise ValueError(
                f"device 'cuda' takes at most {_MAX_TOPK} experts a token and {_MAX_RANKS} ranks a node, got "
                f"num_topk={layout.capacity.num_topk} and {self._topology.ranks_per_node} ranks"
            )
        library = Library(device)
        _check_room_to_plan(placement, library)
        self._wire_dtype, self._placement = layout.settings.wire_dtype, placement
        self._launched_on: list[torch.cuda.Stream] = []
        self._ending_s = _ENDING * layout.settings.timeout_s
        self._last_work: LastWork | None = None
        with ExitStack() as resources, torch.cuda.device(device):
            # Records and words for byte streams stand in host memory; rows never do.
            self._connections = connect(roll, layout.without_rows(), hosts, listen_on)
            resources.callback(self._connections.close)
            self._watch = self._connections.watch
            self._watch.spin_s = _SPIN_S
            device_layout = DeviceLayout(self._topology, layout.capacity, layout.settings)
            memory = _allocate_together(roll, device_layout.offsets["end"], device)
            self._arena = Arena(device_layout, memory, roll)
            resources.callback(self._let_go_of_memory)
            self._kernels = Kernels(library, self._arena, placement)
            self._order = StreamOrder(device, self._kernels, self._launched_on)
            self._network: Network | None = None
            if self._topology.num_nodes > 1:
                num_remote_nodes = self._topology.num_nodes - 1
                self._network = Network(roll, self._watch, device, layout.settings.timeout_s, num_remote_nodes)
                resources.callback(self._network.close)
                self._network.guard.on_stall = self._arena.abort
                self._launched_on.append(self._network.stream)
            self._streams = DeviceStreams(self._connections.memory, self._arena, self._kernels, self._network, device)
            self._rounds = Rounds(roll.rank, self._connections, self._arena.abort)
            self._node = NodeShuffle(self._arena, self._kernels, placement, self._rounds, self._watch)
            self._launched_on.append(self._node.staging_stream)
            self._internode = InternodeShuffle(self._node, self._network) if self._network else None
            if self._internode:
                self._launched_on.append(self._internode.packing_stream)
            self._watch.device_stall = self._device_stall
            torch.cuda.synchronize(device)  # whichever stream the first verb runs on
            roll.gather("arena", "")  # nobody writes to an arena that its owner has not cleared
            self._resources = resources.pop_all()

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
            self._rounds.publish(agreement, [0, *STAGED])
            return None
        inputs = (*order.payloads, order.routing.topk_idx, order.routing.topk_weights)
        with self._order.on_stream(order.launch, *inputs) as stream:
            plan, rows, rejection = (self._internode or self._node).dispatch(agreement, order, stream)
        if plan is not None:
            self._order.hand_over([*rows, *plan.tensors], order.launch)
        return Delivery(plan, rows, rejection)

    def dispatch_along(
        self, agreement: Agreement, plan: Any, payloads: Sequence[torch.Tensor], launch: Launch
    ) -> list[torch.Tensor] | None:
        """See ``Engine``."""
        if agreement.rejection:
            self._rounds.publish(agreement, [0, *STAGED])
            return None
        with self._order.on_stream(launch, *payloads, held=plan.tensors) as stream:
            rows = (self._internode or self._node).dispatch_along(agreement, plan, payloads, launch, stream)
        self._order.hand_over(rows, launch)
        return rows

    def combine(
        self, agreement: Agreement, plan: Any, rows: torch.Tensor, weights: torch.Tensor | None, launch: Launch
    ) -> torch.Tensor | None:
        """See ``Engine``."""
        self._rounds.publish(agreement, [])
        if agreement.rejection:
            return None
        is_weighted = weights is not None
        with self._order.on_stream(launch, rows, held=plan.tensors) as stream, self.profile.spend("wire"):
            same = aligned(rows)
            wire_dtype = torch.promote_types(same.dtype, self._wire_dtype or same.dtype)
            out = (self._internode or self._node).combine(
                plan, same, wire_dtype, launch, stream, is_weighted=is_weighted
            )
        self._order.hand_over([out], launch)
        return out

    def shuffle(self, agreement: Agreement, send: Mapping[int, Segments], receive: Mapping[int, Segments]) -> None:
        """See ``Engine``. Returns when everything has arrived."""
        world_size = self._topology.world_size
        records = self._rounds.publish(agreement, stream_sizes(send, receive, world_size))
        if agreement.rejection:
            return
        check_sizes(records, world_size)
        with self._order.on_stream(Launch()), self.profile.spend("wire"):
            run(self._streams.tasks(send, receive), self._watch)

    def all_to_all(self, agreement: Agreement, exchange: ExchangeOrder | None) -> None:
        """See ``Engine``. In order with everything else on the caller's stream; on one node the host waits for it."""
        itinerary = agree_on_exchange(self._rounds, agreement, exchange, self._topology, self._rank, LINKS)
        if itinerary is None or exchange is None:
            return
        with self.profile.spend("wire"), self._order.on_stream(Launch(), exchange.input, exchange.output) as stream:
            if self._network is None:
                send = _by_peer(exchange.input, exchange.send_rows)
                receive = _by_peer(exchange.output, exchange.receive_rows)
                run(self._streams.tasks(send, receive), self._watch)
                num_rows = sum(exchange.receive_rows) - exchange.receive_rows[self._rank]
                self.profile.intranode_row_bytes += num_rows * exchange.row_bytes
                return
            network = self._network.stream
            network.wait_stream(stream)
            with torch.cuda.stream(network):
                self._kernels.stream = network.cuda_stream
                source, target = exchange.memories
                spare = [source.new_empty(size) for size in itinerary.spare_bytes]
                RoundsOfMessages(itinerary, [source, target, *spare], self._network, self._kernels).run(self.profile)
            stream.wait_stream(network)

    def gather_send(self, segments: Segments, dst: int) -> None:
        """See ``Engine``. Returns when everything has arrived."""
        with self._stream_with(dst, f"gather_send to rank {dst}", segments):
            run(self._streams.tasks({dst: segments}, {}), self._watch)

    def scatter_recv(self, segments: Segments, src: int) -> None:
        """See ``Engine``. Returns when everything has arrived."""
        with self._stream_with(src, f"scatter_recv from rank {src}", segments):
            run(self._streams.tasks({}, {src: segments}), self._watch)

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
        self._order.wait()

    def synchronize(self) -> None:
        """See ``Engine``."""
        with self._rounds.operation("synchronize"):
            if self._order.latest is None:
                return
            done = self._order.mark()
            self._watch.wait_until(done.query, lambda: own_backlog("everything launched to be done"))
            if waited_in_vain := self._device_stall():
                self._watch.find_fault(waited_in_vain, _IN_VAIN)

    def settle(self) -> None:
        """See ``Engine``."""
        with self.collective("settle"):
            self.agree(Agreement("settle"))
        if self._network:
            self._network.finish()

    def has_finished(self) -> bool:
        """See ``Engine``."""
        with torch.cuda.stream(self._order.own):
            return self._has_work_ended() and not self._device_stall() and not self._arena.is_broken()

    def record(self, timeline: Timeline | NoTimeline) -> None:
        """See ``Engine``."""
        self._node.timeline = timeline

    def abandon(self, reason: str) -> None:
        """See ``Engine``."""
        self._rounds.abandon(reason)

    def depart(self, reason: str) -> None:
        """See ``Engine``."""
        self._rounds.depart(reason)

    def close(self) -> None:
        """See ``Engine``."""
        self._rounds.end("it is closed")
        self._resources.close()

    def _let_go_of_memory(self) -> None:
        if self._has_work_ended():
            self._arena.close()
            return
        keep_for_good(self)  # the device may still use it
        warnings.warn(
            f"what a communicator launched on {self._device} has not ended within {self._ending_s:.1f} s: a kernel of "
            f"somebody else's is in its way, or the device has failed. The communicator's memory is never given back",
            stacklevel=2,
        )

    def _has_work_ended(self) -> bool:
        try:
            if self._last_work is None:
                streams = [*self._launched_on, torch.cuda.current_stream(self._device)]
                self._last_work = LastWork(streams, self._ending_s)
            return self._last_work.ends()
        except RuntimeError:  # of CUDA, which will not say more about this device
            return False

    def _device_stall(self) -> Stall | None:
        if self._network and self._network.guard.stall:
            return self._network.guard.stall
        failure = self._arena.failure
        return stall_of(failure, self._arena.node_ranks) if failure.is_set else None

    @contextmanager
    def _stream_with(self, peer: int, name: str, segments: Segments) -> Iterator[None]:
        with self._rounds.operation(name), self._order.on_stream(Launch()):
            self._watch.begin(self._rounds.number, name)
            with stream_with(self._streams, peer, name, segments, self._watch):
                yield


def _check_room_to_plan(placement: ExpertPlacement, library: Library) -> None:
    """Raise ``ValueError`` if any rank has more experts than a block has room to count for; the same on all ranks."""
    num_experts = max(map(len, placement.rank_to_experts))
    needed, limit = plan_shared_bytes(num_experts), library.max_shared_bytes
    if needed > limit:
        raise ValueError(
            f"num_experts={placement.num_experts} puts {num_experts} on one rank, for which planning takes {needed:,} "
            f"bytes of shared memory in a block, but {library.device} has {limit:,}; have fewer, or more ranks"
        )


def _by_peer(rows: torch.Tensor, num_rows: Sequence[int]) -> dict[int, Segments]:
    """Rows in order of the ranks that they go to or come from, where all are of one node."""
    size = row_bytes(rows)
    return {
        peer: Segments(rows, _word((end - of_peer) * size), _word(of_peer * size))
        for peer, (of_peer, end) in enumerate(zip(num_rows, itertools.accumulate(num_rows), strict=True))
    }


def _word(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64, device="cpu")


def _allocate_together(roll: RollCall, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Peer-visible memory on every rank, or ``SharedMemoryError`` on all of them."""
    memory, error = None, ""
    try:
        memory = allocate_visible(num_bytes, device)
    except SharedMemoryError as failure:
        error = str(failure)
    raise_if_any(roll.gather("device memory", error))
    assert memory is not None
    return memory
