"""Exchange of records between all ranks: over TCP with the counterparts on other nodes, then in shared memory."""

from __future__ import annotations

import struct

from fusco.control.fingerprint import CollectiveFingerprint, Record
from fusco.control.node_memory import NodeMemory, wait_for_flag
from fusco.control.tcp_mesh import TcpMesh
from fusco.control.watchdog import Watchdog
from fusco.core.errors import Stall
from fusco.core.profile import CallProfile


class RecordExchange:
    """All-gather of records at the start of a collective."""

    def __init__(self, memory: NodeMemory, mesh: TcpMesh, watchdog: Watchdog) -> None:
        self._memory, self._mesh, self._watchdog = memory, mesh, watchdog
        self._layout, self._topology = memory.layout, memory.layout.topology
        self._counterpart_to_node = {
            memory.counterpart(node): node for node in self._topology.remote_nodes(memory.rank)
        }

    def wait_for_peers_done(self, collective: int) -> None:
        """Wait until no rank of the node reads the shared memory of an earlier collective any more."""
        expected = "the previous call's end"
        flag = self._layout.done_flag
        wait_for_flag(self._memory, self._watchdog, flag, collective - 1, "reuse of shared memory", expected)

    def exchange_records(self, collective: int, record: Record, profile: CallProfile) -> list[Record]:
        """Publish this rank's record and return those of all ranks, by rank."""
        memory, layout, to_node = self._memory, self._layout, self._counterpart_to_node
        local_record = memory.record_bytes(memory.local, memory.node)
        local_text = self._write(local_record, record)
        memory.own.store(layout.record_flag(memory.node), collective)

        self._mesh.begin(
            local_record, {peer: memory.record_bytes(memory.local, node) for peer, node in to_node.items()}
        )
        profile.internode_metadata_bytes += local_record.nbytes * len(to_node)

        def pass_on() -> None:
            for peer in self._mesh.poll():
                memory.own.store(layout.record_flag(to_node[peer]), collective)

        for node in range(self._topology.num_nodes):
            flag, phase = layout.record_flag(node), f"records of node {node}"
            wait_for_flag(memory, self._watchdog, flag, collective, phase, "its record", node, pass_on)
        self._watchdog.wait_until(
            self._has_sent, lambda: Stall("sending records", tuple(to_node), "all sent", "not all")
        )
        return [
            self._read(memory.record_bytes(local, node), local_text, record.fingerprint)
            for local, node in zip(self._topology.rank_to_local, self._topology.rank_to_node, strict=True)
        ]

    def _has_sent(self) -> bool:
        self._mesh.poll()
        return self._mesh.is_done

    def _write(self, memory: memoryview, record: Record) -> bytes:
        text = record.fingerprint.encode()
        header = (len(text), len(record.counts), *record.counts)
        assert len(header) <= self._layout.record_ints, (len(header), self._layout.record_ints)
        first_char = self._layout.record_ints * 8
        assert first_char + len(text) <= self._layout.record_bytes, (len(text), self._layout.record_bytes)
        struct.pack_into(f"{len(header)}q", memory, 0, *header)
        memory[first_char : first_char + len(text)] = text
        return text

    def _read(self, memory: memoryview, local_text: bytes, local: CollectiveFingerprint) -> Record:
        num_chars, num_counts = struct.unpack_from("2q", memory)
        counts = struct.unpack_from(f"{num_counts}q", memory, 16)
        first_char = self._layout.record_ints * 8
        text = memory[first_char : first_char + num_chars].tobytes()
        # Fingerprints are almost always equal; then there is nothing to parse.
        return Record(local if text == local_text else CollectiveFingerprint.decode(text), counts)
