"""The CPU engine: one rank's part in every verb, as sets of tasks over shared memory and gloo."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

import torch

from fusco.balancer import Balancer, Traffic
from fusco.engine.cpu.channel import GlooIn, GlooOut, Incoming, Outgoing, RingIn, RingOut, SendRing
from fusco.engine.cpu.combine import FoldSums, PartialSums, ProducePartialSums
from fusco.engine.cpu.dispatch import ReceiveRows, ScatterRows, SendRows
from fusco.engine.cpu.exchange import Exchange
from fusco.engine.cpu.node_memory import NodeMemory
from fusco.engine.cpu.stream import StreamIn, StreamOut, slice_sizes, word
from fusco.engine.cpu.tasks import Task, run
from fusco.engine.profile import CallProfile
from fusco.engine.record import Agreement, Record, check_agreement
from fusco.errors import (
    ClosedError,
    MismatchError,
    PeerFailureError,
    RejectedInputError,
    SharedMemoryError,
    Stall,
    TransportError,
)
from fusco.kernels.warm_up import warm_up_cpu
from fusco.liveness.sentinel import Sentinel, SentinelAddress
from fusco.liveness.watch import Peer, Watch
from fusco.memory.layout import ArenaLayout
from fusco.memory.recycler import OutputRecycler
from fusco.memory.segment import SegmentAddress, SharedSegment
from fusco.placement import ExpertPlacement
from fusco.planner.forwarding import plan_forwarding
from fusco.planner.plan import DispatchPlan, make_plan
from fusco.planner.routing import Routing
from fusco.segments import Segments
from fusco.topology import Topology
from fusco.transport.gloo import GlooTransport
from fusco.transport.roll_call import RollCall


class CpuEngine:
    """See ``fusco.engine.base.Engine``."""

    def __init__(self, roll: RollCall, layout: ArenaLayout, hosts: Sequence[str], listen_on: str) -> None:
        """Make the rank's memory and connections, together with all other ranks.

        Args:
            roll: finds the other ranks.
            layout: topology, capacity and settings, equal on all ranks.
            hosts: the machine of each rank, as in ``Topology.from_hosts``.
            listen_on: address at which other ranks reach this one.

        """
        warm_up_cpu()
        self._layout, self._rank = layout, roll.rank
        self._topology, self._settings = layout.topology, layout.settings
        self.profile = CallProfile()
        self._collective, self._broken = 0, ""
        self._recycler = OutputRecycler()

        secret = roll.gather("secret", secrets.token_hex(16))[0]
        with ExitStack() as undo:
            self._sentinel = Sentinel(secret, listen_on)
            undo.callback(self._sentinel.close)
            self._connect(roll, hosts, undo)
            undo.pop_all()
        self._exchange = Exchange(self._memory, self._transport, self._watch)

    def _connect(self, roll: RollCall, hosts: Sequence[str], undo: ExitStack) -> None:
        layout = self._layout
        found = roll.gather("sentinel", {"address": asdict(self._sentinel.address), "pid": os.getpid()})
        peers = {
            rank: Peer(SentinelAddress(**entry["address"]), entry["pid"], hosts[rank] == hosts[self._rank])
            for rank, entry in enumerate(found)
            if rank != self._rank
        }
        self._watch = Watch(self._rank, peers, self._sentinel, self._settings.timeout_s)
        undo.callback(self._watch.close)
        self._watch.begin(0, "Communicator")
        roll.wait_until = self._watch.wait_until
        try:
            self._transport = GlooTransport(roll.store, roll.rank, roll.world_size, self._settings.timeout_s)
        except RuntimeError as error:
            symptom = f"the ranks could not be connected over gloo: {str(error).splitlines()[0]}"
            self._watch.ask_everybody(Stall("connecting", tuple(peers), "a connection to each", "too few"), symptom)
            raise TransportError(symptom) from error  # though all ranks live
        undo.callback(self._transport.close)
        self._watch.network_failure = lambda: self._transport.failure
        num_neighbours = sum(host == hosts[self._rank] for host in hosts)
        self._memory = NodeMemory(layout, self._rank, _map_segments(roll, layout, num_neighbours))
        self._private = torch.empty(layout.num_private_slots, layout.slot_bytes, dtype=torch.uint8)
        self._watch.end()

    @property
    def topology(self) -> Topology:
        """See ``Engine``."""
        return self._topology

    @property
    def num_collectives(self) -> int:
        """See ``Engine``."""
        return self._collective

    # What every collective begins and ends with.

    @contextmanager
    def collective(self, operation: str) -> Iterator[None]:
        """See ``Engine``."""
        with self._operation(operation):
            self._collective += 1
            self._watch.begin(self._collective, f"{operation} #{self._collective}")
            self.profile = CallProfile(f"{operation} #{self._collective}")
            self._exchange.wait_for_peers_done(self._collective)
            try:
                yield
            except (MismatchError, RejectedInputError):
                self._finish()  # all ranks raise it, and go on
                raise
            self._finish()

    def agree(self, agreement: Agreement) -> None:
        """See ``Engine``."""
        self._publish(agreement, [])

    def plan(
        self,
        agreement: Agreement,
        routing: Routing,
        placement: ExpertPlacement,
        balancer: Balancer,
        expert_alignment: int,
    ) -> DispatchPlan | None:
        """See ``Engine``."""
        with self.profile.spend("planning"):
            forwarding = plan_forwarding(routing.topk_idx, placement, self._topology)
            records = self._publish(agreement, [routing.num_tokens, *forwarding.num_tokens_to_node])
            if agreement.rejection:
                return None
            num_tokens_to_node = [list(record.counts[1:]) for record in records]
            groups = balancer(Traffic.from_counts(self._topology, num_tokens_to_node))
            for rank, node in enumerate(self._topology.rank_to_node):
                num_tokens_to_node[rank][node] = records[rank].counts[0]
            known = self._exchange.exchange_routing(
                self._collective, routing, forwarding, num_tokens_to_node, self.profile
            )
            return make_plan(
                rank=self._rank,
                placement=placement,
                groups=groups,
                forwarding=forwarding,
                routing=known,
                expert_alignment=expert_alignment,
            )

    def dispatch_rows(self, plan: DispatchPlan, payloads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See ``Engine``."""
        memory, shapes = self._memory, [payload.shape[1:] for payload in payloads]
        sizes = [shape.numel() * payload.dtype.itemsize for payload, shape in zip(payloads, shapes, strict=True)]
        row_bytes, num_tokens = sum(sizes), len(payloads[0])
        with self.profile.spend("staging"):
            rows = memory.pool(memory.local, memory.node, (num_tokens, row_bytes), torch.uint8)
            for payload, size, end in zip(payloads, sizes, itertools.accumulate(sizes), strict=True):
                as_bytes = payload.detach().contiguous().view(-1).view(torch.uint8)
                rows[:, end - size : end].copy_(as_bytes.view(num_tokens, size))
            memory.own.store(self._layout.rows_flag, self._collective)
        with self.profile.spend("wire"):
            num_slots = plan.distribution.num_slots
            outputs = [
                self._recycler.empty((num_slots, *shape), payload.dtype)
                for payload, shape in zip(payloads, shapes, strict=True)
            ]
            as_bytes_out = [
                output.view(-1).view(torch.uint8).view(num_slots, size)
                for output, size in zip(outputs, sizes, strict=True)
            ]
            for output in as_bytes_out:
                output[plan.distribution.padding_slots] = 0
            forwarded = [src for src in plan.sources_held_by(self._rank) if src != self._rank]
            run(
                [
                    SendRows(plan, memory, self._send_ring(), row_bytes, self.profile),
                    self._receive_rows({src: plan.num_rows_from(src) for src in forwarded}, row_bytes, row_bytes),
                    ScatterRows(plan, memory, self._collective, as_bytes_out, row_bytes, self.profile),
                ],
                self._watch,
            )
        return outputs

    def combine_rows(self, plan: DispatchPlan, rows: torch.Tensor, pair_weights: torch.Tensor | None) -> torch.Tensor:
        """See ``Engine``."""
        with self.profile.spend("wire"):
            partials = PartialSums(plan, rows.detach().contiguous(), pair_weights)
            wire_dtype = self._settings.wire_dtype or rows.dtype
            sum_bytes = partials.hidden * partials.dtype.itemsize
            rows_per_chunk = self._layout.rows_per_slot(sum_bytes)
            to_nodes = {
                plan.groups.forwarder(self._rank, node): len(plan.forwarding.node_to_tokens[node])
                for node in self._topology.remote_nodes(self._rank)
            }
            returned = self._receive_rows(to_nodes, partials.hidden * wire_dtype.itemsize, sum_bytes)
            out = self._recycler.empty((plan.num_rows_from(self._rank), partials.hidden), rows.dtype)
            fold = FoldSums(
                plan=plan,
                memory=self._memory,
                partials=partials,
                returned=returned,
                send_ring=self._send_ring(),
                scratch=(self._private[-1], self._private[-2]),
                out=out,
                wire_dtype=wire_dtype,
                rows_per_chunk=rows_per_chunk,
                profile=self.profile,
            )
            produce = ProducePartialSums(plan, self._memory, partials, rows_per_chunk)
            run([produce, fold, returned], self._watch)
        return out

    def shuffle(self, agreement: Agreement, send: Mapping[int, Segments], receive: Mapping[int, Segments]) -> None:
        """See ``Engine``."""
        everyone = range(self._topology.world_size)
        sizes = [[part[rank].total_bytes if rank in part else 0 for rank in everyone] for part in (send, receive)]
        records = self._publish(agreement, sizes[0] + sizes[1])
        if agreement.rejection:
            return
        differing = [
            f"rank {src} sends {sent} bytes to rank {dst}, which expects {expected}"
            for src in everyone
            for dst in everyone
            if (sent := records[src].counts[dst]) != (expected := records[dst].counts[len(everyone) + src])
        ]
        if differing:
            raise MismatchError(f"ranks disagree in shuffle: {'; '.join(differing)}")
        with self.profile.spend("wire"):
            ring = self._send_ring()
            # Each rank starts with the next one, so that receivers take turns.
            order = [(self._rank + step) % len(everyone) for step in everyone]
            tasks: list[Task] = [
                StreamOut(send[r], self._outgoing(r, ring), r, self._slice) for r in order if r in send
            ]
            tasks += [self._stream_in(receive[r], r) for r in order if r in receive]
            run(tasks, self._watch)

    def gather_send(self, segments: Segments, dst: int) -> None:
        """See ``Engine``."""
        with self._operation(f"gather_send to rank {dst}"):
            self._watch.begin(self._collective, f"gather_send to rank {dst}")
            expected = self._trade_sizes(dst, segments.total_bytes)
            if expected != segments.total_bytes:
                self._watch.end()
                raise MismatchError(
                    f"this rank sends {segments.total_bytes} bytes to rank {dst}, which expects {expected}"
                )
            run([StreamOut(segments, self._outgoing(dst, self._send_ring()), dst, self._slice)], self._watch)
            self._watch.end()

    def scatter_recv(self, segments: Segments, src: int) -> None:
        """See ``Engine``."""
        with self._operation(f"scatter_recv from rank {src}"):
            self._watch.begin(self._collective, f"scatter_recv from rank {src}")
            sent = self._trade_sizes(src, segments.total_bytes)
            if sent != segments.total_bytes:
                self._watch.end()
                raise MismatchError(f"rank {src} sends {sent} bytes to this rank, which expects {segments.total_bytes}")
            run([self._stream_in(segments, src)], self._watch)
            self._watch.end()

    def abandon(self, reason: str) -> None:
        """Tell all other ranks that this one will not come back."""
        if not self._broken:
            self._broken = reason
            self._watch.give_up(f"rank {self._rank} {reason}")

    def close(self) -> None:
        """See ``Engine``."""
        self._broken = "it is closed"
        self._watch.close()
        self._sentinel.close()
        self._transport.close()
        self._memory.close()
        self._recycler.close()

    @property
    def _slice(self) -> int:
        return self._layout.slot_bytes

    @contextmanager
    def _operation(self, name: str) -> Iterator[None]:
        if self._broken:
            raise ClosedError(f"{name} was called on a communicator that cannot be used any more: {self._broken}")
        try:
            yield
        except (MismatchError, RejectedInputError):
            raise
        except PeerFailureError as error:
            self._broken = str(error)
            raise
        except BaseException as error:
            self.abandon(f"failed in {name}: {type(error).__name__}: {error}")
            raise

    def _finish(self) -> None:
        self._memory.own.store(self._layout.done_flag, self._collective)
        self._watch.end()

    def _publish(self, agreement: Agreement, counts: list[int]) -> list[Record]:
        records = self._exchange.exchange_records(self._collective, Record(agreement, tuple(counts)), self.profile)
        check_agreement([record.agreement for record in records], self._rank)
        return records

    def _send_ring(self) -> SendRing:
        return SendRing(self._transport, list(self._private[: self._settings.ring_depth]))

    def _receive_rows(self, src_to_rows: dict[int, int], row_bytes: int, slot_row_bytes: int) -> ReceiveRows:
        rows_per_slice = self._layout.rows_per_slot(slot_row_bytes)
        return ReceiveRows(self._memory, self._transport, self._collective, src_to_rows, row_bytes, rows_per_slice)

    def _outgoing(self, dst: int, ring: SendRing) -> Outgoing:
        if dst in self._memory.ranks:
            return RingOut(self._memory, self._memory.ranks.index(dst))
        return GlooOut(ring, dst)

    def _incoming(self, src: int, num_bytes: int) -> Incoming:
        if src in self._memory.ranks:
            return RingIn(self._memory, self._memory.ranks.index(src))
        remote = [rank for rank in range(self._topology.world_size) if rank not in self._memory.ranks]
        first = self._settings.ring_depth + 2 * remote.index(src)
        slots = list(self._private[first : first + 2])
        return GlooIn(self._transport, src, slots, slice_sizes(num_bytes, self._slice))

    def _stream_in(self, segments: Segments, src: int) -> StreamIn:
        return StreamIn(segments, self._incoming(src, segments.total_bytes), src, self._slice)

    def _trade_sizes(self, peer: int, num_bytes: int) -> int:
        """Tell a peer how many bytes this rank means to send or receive, and return what the peer says."""
        theirs = word(0)
        run(
            [
                StreamOut(word(num_bytes), self._outgoing(peer, self._send_ring()), peer, self._slice),
                self._stream_in(theirs, peer),
            ],
            self._watch,
        )
        return int(theirs.base[0])


def _map_segments(roll: RollCall, layout: ArenaLayout, num_neighbours: int) -> list[SharedSegment]:
    """Make this rank's segment and map those of its node, by local rank; where one rank cannot, all raise."""
    with ExitStack() as undo:
        own, error = None, ""
        try:
            own = undo.enter_context(SharedSegment.create(layout.num_bytes, num_neighbours))
        except SharedMemoryError as failure:
            error = str(failure)
        addresses = roll.gather("segment", {"error": error, "address": asdict(own.address) if own else None})
        _raise_if_any([entry["error"] for entry in addresses])
        assert own is not None

        segments = []
        try:
            for rank in layout.topology.node_to_ranks[layout.topology.rank_to_node[roll.rank]]:
                address = SegmentAddress(**addresses[rank]["address"])
                segments.append(own if rank == roll.rank else undo.enter_context(SharedSegment.open_peer(address)))
        except SharedMemoryError as failure:
            error = str(failure)
        _raise_if_any(roll.gather("mapped", error))
        undo.pop_all()
    return segments


def _raise_if_any(errors: Sequence[str]) -> None:
    failed = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error]
    if failed:
        raise SharedMemoryError("; ".join(failed))
