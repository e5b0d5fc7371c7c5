"""Record of a call that is repeated: published, and compared with those of all ranks, by one compiled function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fusco.control.atomics import load_acquire_at, store_release_at
from fusco.control.fingerprint import CollectiveFingerprint
from fusco.control.layout import RECORD_HEADER_INTS
from fusco.control.machine_calls import call_at, yield_address
from fusco.control.node_memory import NUM_COMPARED_INTS, NodeMemory
from fusco.core.compiled import compiled

# Outcomes. After the first two, nothing has been published.
NOT_READY, PEERS_NOT_DONE, RECORDS_MISSING, RECORDS_DIFFER, ALL_EQUAL = range(5)

_POLLS_PER_YIELD, _MAX_YIELDS = 500, 200  # about 0.2 ms; then the watchdog waits
_HANDLE_INT = 2  # of a record's header

# Words of a repeated record, then four tables: conditions of three words, and for each rank the base of its segment,
# the address of its record, and its counts; then this rank's record.
_NUM_RANKS, _NUM_COUNTS, _NUM_CONDITIONS, _OWN_BASE, _OWN_RECORD, _DONE_FLAG, _RECORD_FLAG, _YIELD, _NUM_WORDS = range(
    9
)


class Condition(NamedTuple):
    """A word of memory, an int64, that must have a value in the bits of a mask."""

    address: int
    mask: int
    value: int


@compiled(nogil=True)
def _wait_for(words: Any, first: int, offset: int, value: int) -> bool:
    """Return whether the int64 at an offset from each of the addresses reaches a value within the limit."""
    polls = 0
    for i in range(words[_NUM_RANKS]):
        while load_acquire_at(words[first + i] + offset) < value:
            polls += 1
            if polls % _POLLS_PER_YIELD == 0:
                if polls == _POLLS_PER_YIELD * _MAX_YIELDS:
                    return False
                call_at(words[_YIELD], 0, 0, 0, 0)
    return True


@compiled(nogil=True)
def _publish(words: Any, number: int, handle: int) -> int:
    """Publish the record of the collective ``number``, and compare it; return the outcome."""
    bases = _NUM_WORDS + 3 * words[_NUM_CONDITIONS]
    for condition in range(_NUM_WORDS, bases, 3):
        if load_acquire_at(words[condition]) & words[condition + 1] != words[condition + 2]:
            return NOT_READY
    if not _wait_for(words, bases, words[_DONE_FLAG], number - 1):
        return PEERS_NOT_DONE
    first = bases + words[_NUM_RANKS] * (2 + words[_NUM_COUNTS])
    for i in range(len(words) - first):
        store_release_at(words[_OWN_RECORD] + 8 * i, handle if i == _HANDLE_INT else words[first + i])
    store_release_at(words[_OWN_BASE] + words[_RECORD_FLAG], number)
    return _compare(words, number)


@compiled(nogil=True)
def _compare(words: Any, number: int) -> int:
    """Compare all records of a collective with this rank's, and their counts with the expected ones."""
    num_ranks, num_counts = words[_NUM_RANKS], words[_NUM_COUNTS]
    bases = _NUM_WORDS + 3 * words[_NUM_CONDITIONS]
    if not _wait_for(words, bases, words[_RECORD_FLAG], number):
        return RECORDS_MISSING
    records = bases + num_ranks
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
    """Record of a fingerprint and counts that are expected to be as before on all ranks of a node.

    Attributes:
        text: of the fingerprint, as it is in the record.
    """

    def __init__(
        self,
        memory: NodeMemory,
        fingerprint: CollectiveFingerprint,
        counts: Sequence[Sequence[int]],
        conditions: Sequence[Condition],
    ) -> None:
        """Make the record of a group that is one node.

        Args:
            memory: of the node.
            fingerprint: of the call.
            counts: of all ranks, by rank.
            conditions: without which nothing is published.
        """
        self.text, layout = fingerprint.text, memory.layout
        record = np.zeros(layout.record_bytes // 8, dtype=np.int64)
        own = counts[memory.rank]
        header = [*fingerprint.digest, 0, len(own), len(self.text), *own]
        record[: len(header)] = header
        end = layout.record_ints * 8 + len(self.text)
        record.view(np.uint8)[layout.record_ints * 8 : end] = np.frombuffer(self.text, dtype=np.uint8)
        bases, records = memory.addresses
        offsets = [8 * layout.done_flag, 8 * layout.record_flag(memory.node)]
        words = [len(bases), len(own), len(conditions), bases[memory.local], records[memory.rank], *offsets]
        words += [yield_address(), *(word for condition in conditions for word in condition)]
        words += [*bases, *records, *(count for of_rank in counts for count in of_rank)]
        self._words = np.array([*words, *record[: -(-end // 8)].tolist()], dtype=np.int64)

    def publish(self, number: int, handle: int) -> int:
        """Publish the record of the collective ``number``, and compare it with all others.

        Returns:
            ``NOT_READY`` unless all conditions hold; ``PEERS_NOT_DONE`` if a rank still reads earlier records;
            ``RECORDS_MISSING`` if a rank has not published its own, for a fifth of a millisecond; ``RECORDS_DIFFER``
            if a header is not this rank's, or a count not as expected; ``ALL_EQUAL``, and the call is done with it.
        """
        return int(_publish(self._words, number, handle))

    def compare(self, number: int) -> int:
        """Compare a record that has been published, as ``publish`` does."""
        return int(_compare(self._words, number))


def warm_up_repeated_record() -> None:
    """Compile what publishes and compares records, or read it from the disk cache."""
    words = np.zeros(_NUM_WORDS, dtype=np.int64)  # of no ranks, and with nothing to write but two flags
    flags = np.zeros(1, dtype=np.int64)
    words[_OWN_BASE] = words[_OWN_RECORD] = flags.ctypes.data
    _publish(words, 0, 0)
