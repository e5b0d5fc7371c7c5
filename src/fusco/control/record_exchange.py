"""Exchange of records between all ranks: over TCP with the counterparts on other nodes, then in shared memory."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from fusco.control.fingerprint import CollectiveFingerprint, check_fingerprints
from fusco.control.layout import NODE_AGREES_INT, NUM_ATTACHED_INT, RECORD_HEADER_INTS
from fusco.control.node_memory import NodeMemory, wait_for_flag
from fusco.control.record_round import ALL_AGREE, ALL_HERE, Attachment, RecordRound
from fusco.control.repeated_record import RepeatedRecord
from fusco.control.tcp_transport import TcpTransport
from fusco.control.transport import Mesh
from fusco.control.watchdog import Watchdog
from fusco.core.errors import Stall
from fusco.core.profile import CallProfile

_NUM_ATTACHED = struct.Struct("q")
_LAST_INTS = struct.Struct("2q")  # of a header: bytes of the attachment, and whether the node agrees
assert (NUM_ATTACHED_INT, NODE_AGREES_INT) == (RECORD_HEADER_INTS - 2, RECORD_HEADER_INTS - 1)
_NUM_ATTACHED_OFFSET = 8 * NUM_ATTACHED_INT


class RecordExchange:
    """All-gather of records at the start of a collective.

    A record is an array of int64, then text: the digest of a fingerprint, the number of a handle, the number of counts,
    the bytes of text and those of the attachment, and whether the ranks of the sender's node agree; the counts; and
    from ``record_ints`` on the text of the fingerprint. Ranks compare the first four numbers. Only if they differ,
    which is an error as a rule, does a rank read the texts.

    A record may go to each other node with an attachment: data for the ranks there, which is in the memory of the
    counterpart when the record is, also if ranks then find that they do not agree. An attachment may need data of all
    ranks of the node, and is made when they agree. Records then say so, and a rank that has one from each node, equal
    to its own, knows that all ranks agree: it does not wait for the records that others of its node receive.
    """

    def __init__(self, memory: NodeMemory, mesh: Mesh, watchdog: Watchdog) -> None:
        self.written = b""  # the text in this rank's record; a ``RepeatedRecord`` writes one, too
        self._memory, self._mesh, self._watchdog = memory, mesh, watchdog
        self._layout, self._topology = memory.layout, memory.layout.topology
        self._counterpart_to_node = {
            memory.counterpart(node): node for node in self._topology.remote_nodes(memory.rank)
        }
        self._round: RecordRound | None = None
        if self._counterpart_to_node and isinstance(mesh.transport, TcpTransport):
            self._round = RecordRound(memory, mesh.transport.descriptors)
        self._done_flag, self._record_flag = memory.layout.done_flag, memory.layout.record_flag(memory.node)

    def wait_for_peers_done(self, collective: int) -> None:
        """Wait until no rank of the node reads the shared memory of an earlier collective any more."""
        memory, flag, expected = self._memory, self._done_flag, "the previous call's end"
        if not memory.have_reached(flag, collective - 1):
            wait_for_flag(memory, self._watchdog, flag, collective - 1, "reuse of shared memory", expected)

    def exchange_records(
        self,
        collective: int,
        fingerprint: CollectiveFingerprint,
        handle: int,
        counts: Sequence[int],
        profile: CallProfile,
        attachment: Attachment | Callable[[], Attachment] | None = None,
    ) -> Sequence[tuple[int, ...]]:
        """Publish this rank's record, and return the counts of all ranks, by rank; raises as ``Session.agree``."""
        self._write(fingerprint, handle, counts)
        self._memory.announce_record(collective)
        if not self._counterpart_to_node:
            self.wait_for_records(collective)
        elif callable(attachment):
            assert not counts, counts
            self.wait_for_records(collective)
            has_agreed = self._memory.has_agreed
            attached = attachment() if has_agreed else None
            if self._exchange_between_nodes(collective, profile, attached, has_node_agreed=has_agreed):
                return ((),) * self._topology.world_size
        else:
            self._exchange_between_nodes(collective, profile, attachment, has_node_agreed=False)
        return self.counts_of_all(fingerprint, len(counts))

    def wait_for_records(self, collective: int) -> None:
        """Wait until the records of all ranks of the node are here."""
        memory, flag = self._memory, self._record_flag
        if not memory.have_reached(flag, collective):
            wait_for_flag(memory, self._watchdog, flag, collective, f"records of node {memory.node}", "its record")

    def counts_of_all(self, fingerprint: CollectiveFingerprint, num_counts: int) -> Sequence[tuple[int, ...]]:
        """Return the counts of all ranks, whose records are here; raises as ``Session.agree``."""
        of_ranks = self._memory.counts_of_equal_records(num_counts)
        return self._compare(fingerprint) if of_ranks is None else of_ranks

    def go_on(self, collective: int, record: RepeatedRecord) -> None:
        """Wait for the records that a ``RepeatedRecord`` misses, and for its own to be sent."""
        if not self._counterpart_to_node:
            self.wait_for_records(collective)
            return
        own, to_memory = self._messages()
        sent, received = record.progress.reshape(2, -1).tolist()
        record_bytes = bytes(own)
        moved = zip(to_memory, zip(sent, received, strict=True), strict=True)
        self._mesh.begin(dict.fromkeys(to_memory, record_bytes), to_memory, peer_to_moved=dict(moved))
        self._wait_between_nodes(collective)
        record.progress[:] = self._layout.record_bytes

    def _messages(self) -> tuple[memoryview, dict[int, memoryview]]:
        """Return this rank's record, and memory for that of each counterpart."""
        memory = self._memory
        to_memory = {peer: memory.record_bytes(memory.local, node) for peer, node in self._counterpart_to_node.items()}
        return memory.record_bytes(memory.local, memory.node), to_memory

    def _exchange_between_nodes(
        self, collective: int, profile: CallProfile, attachment: Attachment | None, *, has_node_agreed: bool
    ) -> bool:
        """Exchange records with the counterparts; return True if they tell that all ranks agree.

        Otherwise the records of all ranks are here.
        """
        profile.internode_metadata_bytes += self._layout.record_bytes * len(self._counterpart_to_node)
        peer_to_moved: dict[int, tuple[int, int]] = {}
        if self._round:
            outcome = self._round.run(collective, attachment, has_node_agreed=has_node_agreed)
            if outcome in (ALL_HERE, ALL_AGREE):
                return outcome == ALL_AGREE
            peer_to_moved = dict(zip(self._counterpart_to_node, self._round.progress, strict=True))
        local_record, to_memory = self._messages()
        record = bytes(local_record)
        messages = {
            peer: _message(record, attachment.part(node) if attachment else b"", int(has_node_agreed))
            for peer, node in self._counterpart_to_node.items()
        }
        behind = self._attachment_of if self._layout.attachment_bytes else None
        self._mesh.begin(messages, to_memory, behind, peer_to_moved)
        self._wait_between_nodes(collective)
        return False

    def _attachment_of(self, peer: int) -> memoryview:
        """Return the memory for what is attached to the record of a counterpart, which is here."""
        memory, node = self._memory, self._counterpart_to_node[peer]
        (num_bytes,) = _NUM_ATTACHED.unpack_from(memory.record_bytes(memory.local, node), _NUM_ATTACHED_OFFSET)
        assert 0 <= num_bytes <= self._layout.attachment_bytes, (num_bytes, self._layout.attachment_bytes)
        return memory.attachment(node)[:num_bytes]

    def _wait_between_nodes(self, collective: int) -> None:
        memory, layout, to_node = self._memory, self._layout, self._counterpart_to_node

        def pass_on() -> None:
            for peer in self._mesh.poll():
                memory.own.store(layout.record_flag(to_node[peer]), collective)

        pass_on()
        for node in range(self._topology.num_nodes):
            flag, phase = layout.record_flag(node), f"records of node {node}"
            if memory.have_reached(flag, collective):
                continue
            wait_for_flag(memory, self._watchdog, flag, collective, phase, "its record", node, pass_on)
        if not self._mesh.is_done:
            self._watchdog.wait_until(
                self._has_sent, lambda: Stall("sending records", tuple(to_node), "all sent", "not all")
            )

    def _has_sent(self) -> bool:
        self._mesh.poll()
        return self._mesh.is_done

    def _write(self, fingerprint: CollectiveFingerprint, handle: int, counts: Sequence[int]) -> None:
        memory, text, num_counts = self._memory.own_record, fingerprint.text, len(counts)
        assert RECORD_HEADER_INTS + num_counts <= self._layout.record_ints, (num_counts, self._layout.record_ints)
        numbers = f"{RECORD_HEADER_INTS + num_counts}q"
        struct.pack_into(numbers, memory, 0, *fingerprint.digest, handle, num_counts, len(text), 0, 0, *counts)
        if text is not self.written:
            first_char = self._layout.record_ints * 8
            assert first_char + len(text) <= self._layout.record_bytes, (len(text), self._layout.record_bytes)
            memory[first_char : first_char + len(text)] = text
            self.written = text

    def _compare(self, local: CollectiveFingerprint) -> Sequence[tuple[int, ...]]:
        """Raise the difference between the records of all ranks, unless this rank has rejected its input."""
        fingerprints, counts, first_char = [], [], self._layout.record_ints * 8
        for rank_local, node in zip(self._topology.rank_to_local, self._topology.rank_to_node, strict=True):
            memory = self._memory.record_bytes(rank_local, node)
            _, _, handle, num_counts, num_chars, _, _ = struct.unpack_from(f"{RECORD_HEADER_INTS}q", memory)
            text = memory[first_char : first_char + num_chars].tobytes()
            fingerprints.append(CollectiveFingerprint.decode(text, handle))
            counts.append(struct.unpack_from(f"{num_counts}q", memory, 8 * RECORD_HEADER_INTS))
        check_fingerprints(fingerprints, self._memory.rank, self._topology.numbers)
        assert local.rejection, "records differ in nothing that fingerprints contain"
        return counts


def _message(record: bytes, attached: memoryview | bytes, has_node_agreed: int) -> bytes:
    """Return the message of a record and its attachment, whose size the record then has."""
    first, end = _NUM_ATTACHED_OFFSET, _NUM_ATTACHED_OFFSET + _LAST_INTS.size
    return b"".join((record[:first], _LAST_INTS.pack(len(attached), has_node_agreed), record[end:], attached))
