"""The CPU engine: one rank's part in every verb, as sets of tasks over shared memory and gloo."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from fusco.balancer import Balancer, Traffic
from fusco.engine.cpu.channel import SendRing
from fusco.engine.cpu.combine import FoldSums, PartialSums, ProducePartialSums
from fusco.engine.cpu.connect import connect
from fusco.engine.cpu.dispatch import ReceiveRows, ScatterRows, SendRows
from fusco.engine.cpu.exchange import Exchange
from fusco.engine.cpu.stream import Streams, word
from fusco.engine.cpu.tasks import Task, run
from fusco.engine.profile import CallProfile
from fusco.engine.record import Agreement, Record, check_agreement
from fusco.errors import ClosedError, MismatchError, PeerFailureError, RejectedInputError
from fusco.kernels.warm_up import warm_up_cpu
from fusco.memory.layout import ArenaLayout
from fusco.memory.recycler import OutputRecycler
from fusco.placement import ExpertPlacement
from fusco.planner.forwarding import plan_forwarding
from fusco.planner.plan import DispatchPlan, make_plan
from fusco.planner.routing import Routing
from fusco.segments import Segments
from fusco.topology import Topology
from fusco.transport.roll_call import RollCall


class CpuEngine:
    """See ``fusco.engine.base.Engine``."""

    def __init__(self, roll: RollCall, layout: ArenaLayout, hosts: Sequence[str], listen_on: str) -> None:
        """Connect to all other ranks; for the arguments see ``connect``."""
        warm_up_cpu()
        self._layout, self._rank = layout, roll.rank
        self._topology, self._settings = layout.topology, layout.settings
        self.profile = CallProfile()
        self._collective, self._broken = 0, ""
        self._recycler = OutputRecycler()
        self._private = torch.empty(layout.num_private_slots, layout.slot_bytes, dtype=torch.uint8)
        self._connections = connect(roll, layout, hosts, listen_on)
        self._watch, self._memory = self._connections.watch, self._connections.memory
        self._transport = self._connections.transport
        self._exchange = Exchange(self._memory, self._transport, self._watch)

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
                plain = payload.detach().resolve_conj().resolve_neg().contiguous()
                as_bytes = plain.view(-1).view(torch.uint8)
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
            partials = PartialSums(plan, rows.detach().resolve_neg().contiguous(), pair_weights)
            wire_dtype = torch.promote_types(rows.dtype, self._settings.wire_dtype or rows.dtype)
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
            streams = self._streams()
            # Each rank starts with the next one, so that receivers take turns.
            order = [(self._rank + step) % len(everyone) for step in everyone]
            tasks: list[Task] = [streams.outgoing(send[rank], rank) for rank in order if rank in send]
            tasks += [streams.incoming(receive[rank], rank) for rank in order if rank in receive]
            run(tasks, self._watch)

    def gather_send(self, segments: Segments, dst: int) -> None:
        """See ``Engine``."""
        with self._stream_with(dst, f"gather_send to rank {dst}", segments) as streams:
            run([streams.outgoing(segments, dst)], self._watch)

    def scatter_recv(self, segments: Segments, src: int) -> None:
        """See ``Engine``."""
        with self._stream_with(src, f"scatter_recv from rank {src}", segments) as streams:
            run([streams.incoming(segments, src)], self._watch)

    def abandon(self, reason: str) -> None:
        """Tell all other ranks that this one will not come back."""
        if not self._broken:
            self._broken = reason
            self._watch.give_up(f"rank {self._rank} {reason}")

    def close(self) -> None:
        """See ``Engine``."""
        self._broken = "it is closed"
        self._connections.close()
        self._recycler.close()

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

    def _streams(self) -> Streams:
        return Streams(self._memory, self._transport, self._private)

    @contextmanager
    def _stream_with(self, peer: int, name: str, segments: Segments) -> Iterator[Streams]:
        """A stream to or from one rank, which both sides enter with their number of bytes."""
        with self._operation(name):
            self._watch.begin(self._collective, name)
            streams, ours, theirs = self._streams(), word(segments.total_bytes), word(0)
            run([streams.outgoing(ours, peer), streams.incoming(theirs, peer)], self._watch)
            if (num_bytes := int(theirs.base[0])) != segments.total_bytes:
                self._watch.end()
                raise MismatchError(
                    f"{name}: this rank has {segments.total_bytes} bytes of segments, rank {peer} has {num_bytes} bytes"
                )
            yield streams
            self._watch.end()
