"""Records and routing to everybody who needs them: through the counterparts on other nodes, then the node's memory."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import torch

from fusco.engine.host.node_memory import NodeMemory
from fusco.engine.profile import CallProfile
from fusco.engine.record import Agreement, Record
from fusco.errors import Stall
from fusco.liveness.watch import Watch
from fusco.planner.cost import routing_bytes_per_row
from fusco.planner.distribution import NodeRouting
from fusco.planner.forwarding import NodeForwarding
from fusco.planner.routing import Routing
from fusco.transport.gloo import GlooTransport, Ticket

_METADATA_TAG = 1  # records and routing do not queue behind rows


class Exchange:
    """The start of a collective: every rank learns what every other publishes."""

    def __init__(self, memory: NodeMemory, transport: GlooTransport, watch: Watch) -> None:
        self._memory, self._transport, self._watch = memory, transport, watch
        self._layout, self._topology = memory.layout, memory.layout.topology
        self._remote_nodes = self._topology.remote_nodes(memory.rank)

    def wait_for_peers_done(self, collective: int) -> None:
        """Wait until no rank of the node reads what an earlier collective left in shared memory."""
        self._wait_for_flag(self._layout.done_flag, collective - 1, "reuse of shared memory", "the previous call's end")

    def exchange_records(self, collective: int, record: Record, profile: CallProfile) -> list[Record]:
        """Publish a record and return those of all ranks, by rank."""
        memory = self._memory
        own_text = self._write(memory.record_bytes(memory.local, memory.node), record)
        memory.own.store(self._layout.record_flag(memory.node), collective)

        tickets = [
            self._transport.receive(
                memory.record(memory.local, node),
                memory.counterpart(node),
                _METADATA_TAG,
                functools.partial(memory.own.store, self._layout.record_flag(node), collective),
            )
            for node in self._remote_nodes
        ]
        own = memory.record(memory.local, memory.node)
        tickets += [self._transport.send(own, memory.counterpart(node), _METADATA_TAG) for node in self._remote_nodes]
        profile.internode_metadata_bytes += own.nbytes * len(self._remote_nodes)
        for node in range(self._topology.num_nodes):
            self._wait_for_flag(
                self._layout.record_flag(node), collective, f"records of node {node}", "its record", node, tickets
            )
        self._finish(tickets, "records")
        return [
            self._read(memory.record_bytes(local, node), own_text, record.agreement)
            for local, node in zip(self._topology.rank_to_local, self._topology.rank_to_node, strict=True)
        ]

    def exchange_routing(
        self,
        collective: int,
        routing: Routing,
        forwarding: NodeForwarding,
        num_tokens_to_node: Sequence[Sequence[int]],
        profile: CallProfile,
    ) -> NodeRouting:
        """Publish routing and return that of every token that concerns this node.

        Args:
            collective: number of the collective.
            routing: this rank's routing; weights in the dtype in which they travel.
            forwarding: which of this rank's tokens concern which node.
            num_tokens_to_node: ``[r][n]`` tokens of rank ``r`` concern node ``n``; for its own node, all its tokens.
            profile: where metadata bytes are counted.

        """
        memory = self._memory
        num_topk = routing.num_topk
        weights_dtype = None if routing.topk_weights is None else routing.topk_weights.dtype
        memory.ids(memory.local, memory.node, routing.num_tokens, num_topk).copy_(routing.topk_idx)
        if weights_dtype:
            assert routing.topk_weights is not None
            shape = (routing.num_tokens, num_topk)
            memory.weights(memory.local, memory.node, shape, weights_dtype).copy_(routing.topk_weights.detach())
        memory.own.store(self._layout.routing_flag(memory.node), collective)

        tickets: list[Ticket] = []
        for node in self._remote_nodes:
            tickets += self._receive_routing(collective, node, num_tokens_to_node, num_topk, weights_dtype)
        for node in self._remote_nodes:
            tickets += self._send_routing(node, routing, forwarding.node_to_tokens[node])
        row_bytes = routing_bytes_per_row(num_topk, weights_dtype.itemsize if weights_dtype else 0)
        num_sent = sum(forwarding.num_tokens_to_node[node] for node in self._remote_nodes)
        profile.internode_metadata_bytes += num_sent * row_bytes

        for node in range(self._topology.num_nodes):
            flag = self._layout.routing_flag(node)
            self._wait_for_flag(flag, collective, f"routing of node {node}", "its routing", node, tickets)
        self._finish(tickets, "routing")
        return self._node_routing(num_tokens_to_node, num_topk, weights_dtype)

    def _receive_routing(
        self,
        collective: int,
        node: int,
        num_tokens_to_node: Sequence[Sequence[int]],
        num_topk: int,
        weights_dtype: torch.dtype | None,
    ) -> list[Ticket]:
        memory, src = self._memory, self._memory.counterpart(node)
        num_tokens = num_tokens_to_node[src][memory.node]

        def announce() -> None:
            memory.own.store(self._layout.routing_flag(node), collective)

        if not num_tokens * num_topk:
            announce()
            return []
        ids = memory.ids(memory.local, node, num_tokens, num_topk)
        if weights_dtype is None:
            return [self._transport.receive(ids, src, _METADATA_TAG, announce)]
        weights = memory.weights(memory.local, node, (num_tokens, num_topk), weights_dtype)
        return [
            self._transport.receive(ids, src, _METADATA_TAG),
            self._transport.receive(weights, src, _METADATA_TAG, announce),
        ]

    def _send_routing(self, node: int, routing: Routing, tokens: torch.Tensor) -> list[Ticket]:
        if not len(tokens) * routing.num_topk:
            return []
        dst = self._memory.counterpart(node)
        messages = [routing.topk_idx.to(torch.int32)[tokens]]
        if routing.topk_weights is not None:
            messages.append(routing.topk_weights.detach()[tokens])
        return [self._transport.send(message, dst, _METADATA_TAG) for message in messages]

    def _node_routing(
        self, num_tokens_to_node: Sequence[Sequence[int]], num_topk: int, weights_dtype: torch.dtype | None
    ) -> NodeRouting:
        memory, topology = self._memory, self._topology
        ids, weights, firsts = [], [], [0]
        for src in range(topology.world_size):
            local, node = topology.rank_to_local[src], topology.rank_to_node[src]
            num_tokens = num_tokens_to_node[src][memory.node]
            firsts.append(firsts[-1] + num_tokens)
            ids.append(memory.ids(local, node, num_tokens, num_topk))
            if weights_dtype:
                weights.append(memory.weights(local, node, (num_tokens, num_topk), weights_dtype))
        # Both are copied out of shared memory here: the next collective overwrites it, handles live on.
        return NodeRouting(torch.cat(ids), torch.cat(weights) if weights_dtype else None, tuple(firsts))

    def _wait_for_flag(
        self,
        flag: int,
        value: int,
        phase: str,
        expected: str,
        node: int | None = None,
        tickets: Sequence[Ticket] = (),
    ) -> None:
        """Wait until the flag of every rank of this node has come to ``value``.

        What it announces comes from the rank itself, or, where ``node`` is another one, from its counterpart there.
        """
        memory = self._memory

        def source(local: int) -> int:
            is_remote = node not in (None, memory.node)
            return self._topology.node_to_ranks[node if is_remote and node is not None else memory.node][local]

        def missing() -> list[int]:
            return [local for local, flags in enumerate(memory.flags) if flags.load(flag) < value]

        def is_ready() -> bool:
            for ticket in tickets:
                _ = ticket.is_done  # raises if the network failed
            return not missing()

        def stall() -> Stall:
            waiting = missing()
            # Whoever should send is waited for, and so is the rank of this node that should pass it on.
            ranks = dict.fromkeys([source(local) for local in waiting] + [memory.ranks[local] for local in waiting])
            ranks.pop(memory.rank, None)
            sources = [source(local) for local in waiting]
            return Stall(
                phase, tuple(ranks), f"{expected} from each of {len(memory.flags)} ranks", f"none from {sources}"
            )

        self._watch.wait_until(is_ready, stall)

    def _finish(self, tickets: Sequence[Ticket], what: str) -> None:
        counterparts = tuple(self._memory.counterpart(node) for node in self._remote_nodes)
        self._watch.wait_until(
            lambda: all(ticket.is_done for ticket in tickets),
            lambda: Stall(
                f"sending {what}",
                counterparts,
                f"{len(tickets)} messages through",
                f"{sum(ticket.is_done for ticket in tickets)}",
            ),
        )

    def _write(self, memory: memoryview, record: Record) -> bytes:
        text = record.agreement.encode()
        header = (len(text), len(record.counts), *record.counts)
        assert len(header) <= self._layout.record_ints, (len(header), self._layout.record_ints)
        first_char = self._layout.record_ints * 8
        assert first_char + len(text) <= self._layout.record_bytes, (len(text), self._layout.record_bytes)
        struct.pack_into(f"{len(header)}q", memory, 0, *header)
        memory[first_char : first_char + len(text)] = text
        return text

    def _read(self, memory: memoryview, own_text: bytes, own: Agreement) -> Record:
        num_chars, num_counts = struct.unpack_from("2q", memory)
        counts = struct.unpack_from(f"{num_counts}q", memory, 16)
        first_char = self._layout.record_ints * 8
        text = memory[first_char : first_char + num_chars].tobytes()
        # As a rule all ranks say the same, and need not spell it out to each other.
        return Record(own if text == own_text else Agreement.decode(text), counts)
