"""Round of records between counterparts of different nodes, and what is attached to them, in one compiled call.

A rank that exchanges messages with many nodes would otherwise run Python for every message that comes.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fusco.control.flags import load_acquire_at, store_release_at
from fusco.control.layout import NODE_AGREES_INT, NUM_ATTACHED_INT, NUM_COMPARED_INTS, RECORD_HEADER_INTS
from fusco.control.machine_calls import NUM_YIELD_WORDS, call_at, libc_address, yield_since, yield_words
from fusco.control.node_memory import NodeMemory
from fusco.core.compiled import compiled

# Outcomes: not all is here within the limit; all records are here; all ranks agree, as the nodes' records say.
MISSING, ALL_HERE, ALL_AGREE = range(3)

_MAX_LOOKS = 200  # in vain, with a yield between them: some 20 ms on a core that others need
_SOCKET_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_HEADER_BYTES = 8 * RECORD_HEADER_INTS
_IntArray = npt.NDArray[np.int64]

# Words of a round, then those of a yield. _NO_TIME is seconds and nanoseconds.
_SENDMSG, _RECEIVE, _PPOLL, _OWN_RECORD, _RECORD_BYTES, _MOST_ATTACHED, _NO_TIME, _YIELD = 0, 1, 2, 3, 4, 5, 6, 8
# Words of a message, behind its header.
_VECTORS, _MESSAGE = RECORD_HEADER_INTS, RECORD_HEADER_INTS + 6
_VECTORS_INT, _NUM_VECTORS_INT, _NUM_MESSAGE_WORDS = _MESSAGE + 2, _MESSAGE + 3, _MESSAGE + 7


class Attachment(NamedTuple):
    """Data that goes with a rank's record, to each other node a part of it."""

    memory: torch.Tensor  # contiguous, on the CPU
    bounds: _IntArray  # (num_nodes + 1,): node n gets bytes bounds[n] to bounds[n + 1], its own node none

    def part(self, node: int) -> memoryview:
        """Return the bytes for a node."""
        first, end = self.bounds[node : node + 2].tolist()
        return self.memory.view(-1).view(torch.uint8).numpy().data[first:end]


class _Tables(NamedTuple):
    """What the compiled functions read and write; all are int64."""

    words: _IntArray
    # (num_peers, 5), for each counterpart: its connection, addresses of its record, of what is behind it and of the
    # flag that both are here, and its node
    peers: _IntArray
    flags: _IntArray  # addresses of the flags of all nodes, of all ranks of this node
    parts: _IntArray  # (num_peers, 2): address and bytes of what is attached for each counterpart
    progress: _IntArray  # (num_peers, 2): bytes sent to each, and received
    message: _IntArray  # a header, three ``iovec`` of two words, and a ``msghdr`` of seven
    polls: _IntArray  # (2, num_peers): a ``pollfd`` for each wait, and which counterpart it is for


_FD, _RECORD, _BEHIND, _FLAG, _NODE = range(5)


class RecordRound:
    """Rounds of one rank; ``progress`` has the bytes sent to and received from each counterpart in the latest one."""

    def __init__(self, memory: NodeMemory, descriptors: Mapping[int, int]) -> None:
        """``descriptors`` are those of the connection to each counterpart, which nothing else uses in a round."""
        self._memory, layout, (bases, records) = memory, memory.layout, memory.addresses
        nodes, own = layout.topology.remote_nodes(memory.rank), bases[memory.local]
        words = [*map(libc_address, ("sendmsg", "recv", "ppoll")), records[memory.rank], layout.record_bytes]
        peers = [
            (
                descriptors[memory.counterpart(node)],
                own + layout.record_offset(node),
                own + layout.attachment_offset(node),
                own + 8 * layout.record_flag(node),
                node,
            )
            for node in nodes
        ]
        flags = [base + 8 * layout.record_flag(node) for node in range(layout.topology.num_nodes) for base in bases]
        self._tables = _tables([*words, layout.attachment_bytes, 0, 0, *yield_words()], peers, flags)
        self._nothing = np.zeros(layout.topology.num_nodes + 1, np.int64)

    @property
    def progress(self) -> list[tuple[int, int]]:
        """Bytes sent to each counterpart in the latest round, and received from it."""
        return [(sent, received) for sent, received in self._tables.progress.tolist()]

    def run(self, number: int, attachment: Attachment | None, *, has_node_agreed: bool) -> int:
        """Exchange the records of a collective as far as that goes without a long wait; return the outcome.

        With ``has_node_agreed`` this record tells that all ranks of this node have published an equal one. If all
        others tell that, too, and equal it, the outcome is ``ALL_AGREE``: then all ranks agree, although records may be
        missing from the memory of other ranks of this node.
        """
        address, bounds = 0, self._nothing
        if attachment is not None:
            address, bounds = attachment.memory.data_ptr(), attachment.bounds
        kept = self._memory.bytes  # mapped, although a signal handler may close it just before the call
        outcome = int(_run(self._tables, address, bounds, number, int(has_node_agreed))) if kept else MISSING
        del kept
        return outcome


def _tables(words: Sequence[int], peers: Sequence[tuple[int, ...]], flags: Sequence[int]) -> _Tables:
    num_peers = len(peers)
    return _Tables(
        np.array(words, np.int64),
        np.array(peers, np.int64).reshape(num_peers, _NODE + 1),
        np.array(flags, np.int64),
        *np.zeros((2, num_peers, 2), np.int64),
        np.zeros(_NUM_MESSAGE_WORDS, np.int64),
        np.zeros((2, num_peers), np.int64),
    )


@compiled(nogil=True)
def _send(tables: Any, i: int) -> int:
    """Send what is left of the record for a counterpart and of what is behind it; return the bytes taken, or -1."""
    words, message, num_sent = tables.words, tables.message, tables.progress[i, 0]
    message[NUM_ATTACHED_INT] = tables.parts[i, 1]
    vectors = message[_VECTORS:_MESSAGE]
    vectors[0], vectors[1] = message.ctypes.data, _HEADER_BYTES
    vectors[2], vectors[3] = words[_OWN_RECORD] + _HEADER_BYTES, words[_RECORD_BYTES] - _HEADER_BYTES
    vectors[4], vectors[5] = tables.parts[i, 0], tables.parts[i, 1]
    for j in range(3):
        num_skipped = min(num_sent, vectors[2 * j + 1])
        vectors[2 * j] += num_skipped
        vectors[2 * j + 1] -= num_skipped
        num_sent -= num_skipped
    message[_VECTORS_INT], message[_NUM_VECTORS_INT] = vectors.ctypes.data, 3
    return call_at(words[_SENDMSG], tables.peers[i, _FD], message[_MESSAGE:].ctypes.data, _SOCKET_FLAGS, 0, 0, 0)


@compiled(nogil=True)
def _receive(tables: Any, i: int) -> int:
    """Receive what is here of a counterpart's record and of what is behind it; return the number of bytes."""
    words, peer, num_before = tables.words, tables.peers[i], tables.progress[i, 1]
    record_bytes, num_received = words[_RECORD_BYTES], num_before
    if num_received < record_bytes:
        to, rest = peer[_RECORD] + num_received, record_bytes - num_received
        num_received += max(0, call_at(words[_RECEIVE], peer[_FD], to, rest, _SOCKET_FLAGS, 0, 0))
    if num_received >= record_bytes:
        num_attached: int = load_acquire_at(peer[_RECORD] + 8 * NUM_ATTACHED_INT)
        to, rest = peer[_BEHIND] + num_received - record_bytes, record_bytes + num_attached - num_received
        if rest > 0 and num_attached <= words[_MOST_ATTACHED]:
            num_received += max(0, call_at(words[_RECEIVE], peer[_FD], to, rest, _SOCKET_FLAGS, 0, 0))
    tables.progress[i, 1] = num_received
    return num_received - num_before


@compiled(nogil=True)
def _is_received(tables: Any, i: int) -> bool:
    record_bytes, num_received = tables.words[_RECORD_BYTES], tables.progress[i, 1]
    if num_received < record_bytes:
        return False
    return num_received == record_bytes + load_acquire_at(tables.peers[i, _RECORD] + 8 * NUM_ATTACHED_INT)


@compiled(nogil=True)
def _list_polls(tables: Any) -> int:
    """List the sockets that this rank waits for; return their number."""
    num_polls = 0
    for i in range(len(tables.peers)):
        is_sent = tables.progress[i, 0] == tables.words[_RECORD_BYTES] + tables.parts[i, 1]
        events = (0 if is_sent else select.POLLOUT) | (0 if _is_received(tables, i) else select.POLLIN)
        if events:
            tables.polls[0, num_polls], tables.polls[1, num_polls] = tables.peers[i, _FD] | events << 32, i
            num_polls += 1
    return num_polls


@compiled(nogil=True)
def _serve(tables: Any, num_polls: int, number: int) -> bool:
    """Send and receive where sockets are ready; return False if one is and nothing moved, which is an error."""
    for j in range(num_polls):
        events, i = tables.polls[0, j] >> 48, tables.polls[1, j]
        if events & select.POLLOUT:
            moved = _send(tables, i)
            if moved <= 0:
                return False
            tables.progress[i, 0] += moved
        if events & select.POLLIN:
            if not _receive(tables, i):
                return False
            if _is_received(tables, i):
                store_release_at(tables.peers[i, _FLAG], number)
        elif events & ~select.POLLOUT:
            return False
    return True


@compiled(nogil=True)
def _move(tables: Any, number: int) -> bool:
    """Send and receive all messages; return False if that takes long, or a connection does not work."""
    words, looks, since_ns = tables.words, 0, 0
    for i in range(len(tables.peers)):
        tables.progress[i, 0] = tables.progress[i, 1] = 0
        tables.progress[i, 0] = max(0, _send(tables, i))
    while True:
        num_polls = _list_polls(tables)
        if not num_polls:
            return True
        no_time = words[_NO_TIME:].ctypes.data
        if call_at(words[_PPOLL], tables.polls.ctypes.data, num_polls, no_time, 0, 0, 0) > 0:
            if not _serve(tables, num_polls, number):
                return False
            looks, since_ns = 0, 0
        else:
            looks, since_ns = looks + 1, yield_since(words[_YIELD:], since_ns)
            if since_ns < 0 or looks == _MAX_LOOKS:
                return False


@compiled(nogil=True)
def _do_all_agree(tables: Any) -> bool:
    """Return whether each node's record tells that its ranks agree, and equals this rank's."""
    own = tables.words[_OWN_RECORD]
    for i in range(len(tables.peers)):
        record = tables.peers[i, _RECORD]
        if load_acquire_at(record + 8 * NODE_AGREES_INT) != 1:
            return False
        for word in range(NUM_COMPARED_INTS):
            if load_acquire_at(record + 8 * word) != load_acquire_at(own + 8 * word):
                return False
    return True


@compiled(nogil=True)
def _run(tables: Any, address: int, bounds: Any, number: int, has_node_agreed: int) -> int:
    words = tables.words
    for word in range(RECORD_HEADER_INTS):
        tables.message[word] = load_acquire_at(words[_OWN_RECORD] + 8 * word)
    tables.message[NODE_AGREES_INT] = has_node_agreed
    for i in range(len(tables.peers)):
        first, end = bounds[tables.peers[i, _NODE]], bounds[tables.peers[i, _NODE] + 1]
        tables.parts[i, 0], tables.parts[i, 1] = address + first, end - first
    if not _move(tables, number):
        return MISSING
    if has_node_agreed and _do_all_agree(tables):
        return ALL_AGREE
    looks, since_ns = 0, 0
    for i in range(len(tables.flags)):
        while load_acquire_at(tables.flags[i]) < number:
            looks, since_ns = looks + 1, yield_since(words[_YIELD:], since_ns)
            if since_ns < 0 or looks == _MAX_LOOKS:
                return MISSING
    return ALL_HERE


def warm_up_record_round() -> None:
    """Compile a round, or read it from the disk cache."""
    record = np.zeros(RECORD_HEADER_INTS, np.int64)
    words = np.zeros(_YIELD + NUM_YIELD_WORDS, np.int64)
    words[_OWN_RECORD] = record.ctypes.data
    _run(_tables(words.tolist(), [], []), 0, np.zeros(1, np.int64), 0, 0)
