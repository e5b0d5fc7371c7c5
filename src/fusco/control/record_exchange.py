"""Exchange of records between all ranks: over TCP with the counterparts on other nodes, then in shared memory."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fusco.control.fingerprint import CollectiveFingerprint, check_fingerprints
from fusco.control.layout import RECORD_HEADER_INTS
from fusco.control.node_memory import NodeMemory, wait_for_flag
from fusco.control.repeated_record import RepeatedRecord
from fusco.control.transport import Mesh
from fusco.control.watchdog import Watchdog
from fusco.core.errors import Stall
from fusco.core.profile import CallProfile

Attachment = npt.NDArray[np.uint8]
_ATTACHMENT_BYTES, _ATTACHMENT_BYTES_OFFSET = struct.Struct("q"), 8 * (RECORD_HEADER_INTS - 1)


class RecordExchange:
    """All-gather of records at the start of a collective.

    A record is an array of int64, then text: the digest of a fingerprint, the number of a handle, the number of counts,
    the bytes of text and those of the attachment; the counts; and from ``record_ints`` on the text of the fingerprint.
    Ranks compare the first four numbers. Only if they differ, which is an error as a rule, does a rank read the texts.

    A record may go to each other node with an attachment: data for the ranks there, which is in the memory of the
    counterpart when the record is, also if ranks then find that they do not agree.
    """

    def __init__(self, memory: NodeMemory, mesh: Mesh, watchdog: Watchdog) -> None:
        self._memory, self._mesh, self._watchdog = memory, mesh, watchdog
        self._layout, self._topology = memory.layout, memory.layout.topology
        self._counterpart_to_node = {
            memory.counterpart(node): node for node in self._topology.remote_nodes(memory.rank)
        }
        self._written = b""  # the text in this rank's record
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
        attachments: Mapping[int, Attachment],
    ) -> Sequence[tuple[int, ...]]:
        """Publish this rank's record, and return the counts of all ranks, by rank; raises as ``Session.agree``.

        ``attachments`` are by node, not of this rank's node.
        """
        self._write(fingerprint, handle, counts)
        self._memory.announce_record(collective)
        if self._counterpart_to_node:
            self._exchange_between_nodes(collective, profile, attachments)
        else:
            self.wait_for_records(collective)
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

    def count_as_written(self, text: bytes) -> None:
        """Note the text in this rank's record, which a ``RepeatedRecord`` has written."""
        self._written = text

    def go_on(self, collective: int, record: RepeatedRecord) -> None:
        """Wait for the records that a ``RepeatedRecord`` misses, and for its own to be sent."""
        if not self._counterpart_to_node:
            self.wait_for_records(collective)
            return
        self._mesh.resume(*self._messages(), record.progress.tolist())
        self._wait_between_nodes(collective)
        record.progress[:] = self._layout.record_bytes

    def _messages(self) -> tuple[memoryview, dict[int, memoryview]]:
        """Return this rank's record, and memory for that of each counterpart."""
        memory = self._memory
        to_memory = {peer: memory.record_bytes(memory.local, node) for peer, node in self._counterpart_to_node.items()}
        return memory.record_bytes(memory.local, memory.node), to_memory

    def _exchange_between_nodes(
        self, collective: int, profile: CallProfile, attachments: Mapping[int, Attachment]
    ) -> None:
        local_record, to_memory = self._messages()
        record = bytes(local_record)
        messages = {peer: _attach(record, attachments.get(node)) for peer, node in self._counterpart_to_node.items()}
        self._mesh.begin(messages, to_memory, self._attachment_of if self._layout.attachment_bytes else None)
        profile.internode_metadata_bytes += len(record) * len(to_memory)
        self._wait_between_nodes(collective)

    def _attachment_of(self, peer: int) -> memoryview:
        """Return the memory for what is attached to the record of a counterpart, which is here."""
        memory, node = self._memory, self._counterpart_to_node[peer]
        (num_bytes,) = _ATTACHMENT_BYTES.unpack_from(memory.record_bytes(memory.local, node), _ATTACHMENT_BYTES_OFFSET)
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
        struct.pack_into(numbers, memory, 0, *fingerprint.digest, handle, num_counts, len(text), 0, *counts)
        if text is not self._written:
            first_char = self._layout.record_ints * 8
            assert first_char + len(text) <= self._layout.record_bytes, (len(text), self._layout.record_bytes)
            memory[first_char : first_char + len(text)] = text
            self._written = text

    def _compare(self, local: CollectiveFingerprint) -> Sequence[tuple[int, ...]]:
        """Raise the difference between the records of all ranks, unless this rank has rejected its input."""
        fingerprints, counts, first_char = [], [], self._layout.record_ints * 8
        for rank_local, node in zip(self._topology.rank_to_local, self._topology.rank_to_node, strict=True):
            memory = self._memory.record_bytes(rank_local, node)
            _, _, handle, num_counts, num_chars, _ = struct.unpack_from(f"{RECORD_HEADER_INTS}q", memory)
            text = memory[first_char : first_char + num_chars].tobytes()
            fingerprints.append(CollectiveFingerprint.decode(text, handle))
            counts.append(struct.unpack_from(f"{num_counts}q", memory, 8 * RECORD_HEADER_INTS))
        check_fingerprints(fingerprints, self._memory.rank)
        assert local.rejection, "records differ in nothing that fingerprints contain"
        return counts


def _attach(record: bytes, attachment: Attachment | None) -> bytes:
    """Return the message of a record and its attachment, whose size the record then has."""
    if attachment is None:
        return record
    first, end = _ATTACHMENT_BYTES_OFFSET, _ATTACHMENT_BYTES_OFFSET + _ATTACHMENT_BYTES.size
    return b"".join((record[:first], _ATTACHMENT_BYTES.pack(attachment.nbytes), record[end:], attachment.data))
