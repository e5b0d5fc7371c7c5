"""Record of a call that is repeated: published, and compared with those of all ranks, by one compiled function."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fusco.control.fingerprint import CollectiveFingerprint
from fusco.control.flags import load_acquire_at, store_release_at
from fusco.control.layout import NUM_COMPARED_INTS, RECORD_HEADER_INTS
from fusco.control.machine_calls import NUM_YIELD_WORDS, call_at, libc_address, yield_since, yield_words
from fusco.control.node_memory import NodeMemory
from fusco.core.compiled import compiled

# Outcomes. After the first two, nothing has been published.
NOT_READY, PEERS_NOT_DONE, RECORDS_MISSING, RECORDS_DIFFER, ALL_EQUAL = range(5)

_POLLS_PER_YIELD, _MAX_YIELDS = 500, 200  # about 0.2 ms; then the watchdog waits
_ROUNDS_PER_YIELD, _MAX_ROUNDS = 4, 2000  # of messages over TCP: about a millisecond
_HANDLE_INT = 2  # of a record's header
_SOCKET_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL

# Words of a repeated record, then tables: conditions of three words; the counterparts on other nodes, with their
# connection, the address of their record, and the flag that it is here; the flags of all nodes; for each rank of the
# node the base of its segment; for each rank the address of its record, and its counts; then this rank's record.
_NUM_RANKS, _NUM_LOCAL, _NUM_COUNTS, _NUM_CONDITIONS, _NUM_PEERS, _NUM_NODES, _OWN_BASE, _OWN_RECORD = range(8)
_DONE_FLAG, _RECORD_FLAG, _RECORD_BYTES, _SEND, _RECEIVE, _YIELD = range(8, 14)
_NUM_WORDS = _YIELD + NUM_YIELD_WORDS
_CONDITION_WORDS = _PEER_WORDS = 3


class Condition(NamedTuple):
    """A word of memory, an int64, that must have a value in the bits of a mask."""

    address: int
    mask: int
    value: int


@compiled(nogil=True)
def _wait_for(words: Any, first: int, offset: int, value: int) -> bool:
    """Return whether the int64 at an offset from each of the node's segments reaches a value within the limit."""
    polls, since_ns = 0, 0
    for i in range(words[_NUM_LOCAL]):
        while load_acquire_at(words[first + i] + offset) < value:
            polls += 1
            if polls % _POLLS_PER_YIELD == 0:
                since_ns = yield_since(words[_YIELD:], since_ns)
                if since_ns < 0 or polls == _POLLS_PER_YIELD * _MAX_YIELDS:
                    return False
    return True


@compiled(nogil=True)
def _move(words: Any, progress: Any, number: int) -> bool:
    """Send and receive records without blocking; return whether all have been sent and received.

    ``progress`` has the bytes sent to each counterpart, then those received from each. Errors show as no progress.
    """
    num_peers, size, is_done = words[_NUM_PEERS], words[_RECORD_BYTES], True
    peer = _NUM_WORDS + _CONDITION_WORDS * words[_NUM_CONDITIONS]
    for i in range(num_peers):
        rest = size - progress[i]
        if rest:
            moved: int = call_at(words[_SEND], words[peer], words[_OWN_RECORD] + progress[i], rest, _SOCKET_FLAGS, 0, 0)
            progress[i] += max(0, moved)
            is_done = is_done and moved == rest
        rest = size - progress[num_peers + i]
        if rest:
            to = words[peer + 1] + progress[num_peers + i]
            moved = call_at(words[_RECEIVE], words[peer], to, rest, _SOCKET_FLAGS, 0, 0)
            progress[num_peers + i] += max(0, moved)
            if moved == rest:
                store_release_at(words[_OWN_BASE] + words[peer + 2], number)
            else:
                is_done = False
        peer += _PEER_WORDS
    return is_done


@compiled(nogil=True)
def _publish(words: Any, progress: Any, number: int, handle: int) -> int:
    """Publish the record of the collective ``number``, and compare it; return the outcome."""
    flags = _NUM_WORDS + _CONDITION_WORDS * words[_NUM_CONDITIONS] + _PEER_WORDS * words[_NUM_PEERS]
    for i in range(words[_NUM_CONDITIONS]):
        condition = _NUM_WORDS + _CONDITION_WORDS * i
        if load_acquire_at(words[condition]) & words[condition + 1] != words[condition + 2]:
            return NOT_READY
    bases = flags + words[_NUM_NODES]
    if not _wait_for(words, bases, words[_DONE_FLAG], number - 1):
        return PEERS_NOT_DONE
    first = bases + words[_NUM_LOCAL] + words[_NUM_RANKS] * (1 + words[_NUM_COUNTS])
    for i in range(len(words) - first):
        store_release_at(words[_OWN_RECORD] + 8 * i, handle if i == _HANDLE_INT else words[first + i])
    store_release_at(words[_OWN_BASE] + words[_RECORD_FLAG], number)
    for i in range(len(progress)):
        progress[i] = 0
    return _compare(words, progress, number)


@compiled(nogil=True)
def _have_arrived(words: Any, progress: Any, number: int, flags: int) -> bool:
    """Return whether all records of a collective arrive, and this rank's is sent, within the limit."""
    rounds, since_ns = 0, 0
    while not _move(words, progress, number):
        rounds += 1
        if rounds == _MAX_ROUNDS:
            return False
        if rounds % _ROUNDS_PER_YIELD == 0:
            since_ns = yield_since(words[_YIELD:], since_ns)
            if since_ns < 0:
                return False
    for node in range(words[_NUM_NODES]):
        if not _wait_for(words, flags + words[_NUM_NODES], words[flags + node], number):
            return False
    return True


@compiled(nogil=True)
def _compare(words: Any, progress: Any, number: int) -> int:
    """Compare all records of a collective with this rank's, and their counts with the expected ones."""
    num_ranks, num_counts = words[_NUM_RANKS], words[_NUM_COUNTS]
    flags = _NUM_WORDS + _CONDITION_WORDS * words[_NUM_CONDITIONS] + _PEER_WORDS * words[_NUM_PEERS]
    if not _have_arrived(words, progress, number, flags):
        return RECORDS_MISSING
    records = flags + words[_NUM_NODES] + words[_NUM_LOCAL]
    for i in range(num_ranks):
        record = words[records + i]
        for word in range(NUM_COMPARED_INTS):
            if load_acquire_at(record + 8 * word) != load_acquire_at(words[_OWN_RECORD] + 8 * word):
                return RECORDS_DIFFER
        for j in range(num_counts):
            expected = words[records + num_ranks + i * num_counts + j]
            if load_acquire_at(record + 8 * (RECORD_HEADER_INTS + j)) != expected:
                return RECORDS_DIFFER
    store_release_at(words[_OWN_BASE] + words[_DONE_FLAG], number)
    return ALL_EQUAL


class RepeatedRecord:
    """Record of a fingerprint and counts that are expected to be as before on all ranks.

    Attributes:
        text: of the fingerprint, as it is in the record.
        progress: bytes of it sent to each counterpart on another node, then bytes received of theirs.
        internode_bytes: bytes of it that are sent to other nodes.
    """

    def __init__(
        self,
        memory: NodeMemory,
        fingerprint: CollectiveFingerprint,
        counts: Sequence[Sequence[int]],
        conditions: Sequence[Condition],
        descriptors: Mapping[int, int] | None = None,
    ) -> None:
        """Make the record of a call with these counts of all ranks, by rank.

        Nothing is published unless all conditions hold. ``descriptors`` are those of the connection to each
        counterpart, if there are several nodes.
        """
        self.text, layout, own = fingerprint.text, memory.layout, counts[memory.rank]
        remotes, nodes = layout.topology.remote_nodes(memory.rank), range(layout.topology.num_nodes)
        record = np.zeros(layout.record_bytes // 8, dtype=np.int64)
        header = [*fingerprint.digest, 0, len(own), len(self.text), 0, 0, *own]
        record[: len(header)] = header
        end = layout.record_ints * 8 + len(self.text)
        record.view(np.uint8)[layout.record_ints * 8 : end] = np.frombuffer(self.text, dtype=np.uint8)
        bases, records = memory.addresses
        words = [len(records), len(bases), len(own), len(conditions), len(remotes), len(nodes)]
        words += [bases[memory.local], records[memory.rank], 8 * layout.done_flag, 8 * layout.record_flag(memory.node)]
        words += [layout.record_bytes, libc_address("send"), libc_address("recv"), *yield_words()]
        words += [word for condition in conditions for word in condition]
        for node in remotes:
            peer = memory.counterpart(node)
            assert descriptors, "no connections to other nodes"
            words += [descriptors[peer], bases[memory.local] + layout.record_offset(node), 8 * layout.record_flag(node)]
        words += [8 * layout.record_flag(node) for node in nodes]
        words += [*bases, *records, *(count for of_rank in counts for count in of_rank)]
        self._words = np.array([*words, *record[: -(-end // 8)].tolist()], dtype=np.int64)
        self.progress = np.zeros(2 * len(remotes), dtype=np.int64)
        self.internode_bytes = len(remotes) * layout.record_bytes

    def publish(self, number: int, handle: int) -> int:
        """Publish the record of the collective ``number``, and compare it with all others.

        Returns:
            ``NOT_READY`` unless all conditions hold; ``PEERS_NOT_DONE`` if a rank still reads earlier records;
            ``RECORDS_MISSING`` if a rank has not published its own, for a fifth of a millisecond, or a full one between
            nodes; ``RECORDS_DIFFER`` if a header is not this rank's, or a count not as expected; ``ALL_EQUAL``, and the
            call is done with it.
        """
        return _publish(self._words, self.progress, number, handle)

    def compare(self, number: int) -> int:
        """Compare a record that has been published, as ``publish`` does."""
        return _compare(self._words, self.progress, number)


def warm_up_repeated_record() -> None:
    """Compile what publishes and compares records, or read it from the disk cache."""
    words, progress = np.zeros(_NUM_WORDS, dtype=np.int64), np.zeros(0, dtype=np.int64)
    flags = np.zeros(1, dtype=np.int64)  # of no ranks, and with nothing to write but two flags
    words[_OWN_BASE] = words[_OWN_RECORD] = flags.ctypes.data
    _publish(words, progress, 0, 0)
