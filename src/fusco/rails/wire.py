"""Records of the wire: 32 bytes each, little-endian; a data record is followed by its payload.

======  ======  =====================================  =======================
bytes   field   of a credit                            of a data record
======  ======  =====================================  =======================
0-7     seq     number of the message, from 0          the same
8-15    size    bytes of the receive buffer            bytes of the message
16-19   slot    chunk that has arrived                 chunk that follows
20-23   mask    rails that are idle at the receiver    bytes of the payload
24-27   epoch   age of the mask: counts credits        0
28-29   kind    ``GRANT`` or ``ACK``                   ``DATA``, ``TOO_LARGE``
30-31   magic   ``MAGIC``                              ``MAGIC``
======  ======  =====================================  =======================
"""

from __future__ import annotations

import struct
from typing import NamedTuple

RECORD_BYTES = 32
MAGIC = 0xF5C1
_RECORD = struct.Struct("<QQIIIHH")
EPOCHS = 1 << 32

DATA = 1  # a chunk follows
GRANT = 2  # a receive is posted: a buffer of `size` bytes for message `seq`
ACK = 3  # chunk `slot` of message `seq` has arrived
TOO_LARGE = 4  # message `seq` of `size` bytes does not fit into the buffer granted
RAIL_DOWN = 5  # rail `slot` has failed at the sender of this record
BYE = 6  # the sender of this record has closed the channel


class WireError(ValueError):
    """Bytes that no peer of this version sends; their connection is closed."""


class Record(NamedTuple):
    """One record; see the table above."""

    seq: int = 0
    size: int = 0
    slot: int = 0
    mask: int = 0
    epoch: int = 0
    kind: int = 0
    magic: int = MAGIC


def pack(record: Record) -> bytes:
    """Return the 32 bytes of a record.

    >>> unpack(pack(Record(seq=7, size=100, slot=3, mask=0b10, epoch=9, kind=ACK)))[:6]
    (7, 100, 3, 2, 9, 3)
    """
    return _RECORD.pack(*record)


def unpack(record: bytes | bytearray | memoryview) -> Record:
    """Return the record of 32 bytes; ``WireError`` unless ``pack`` made them."""
    try:
        fields = Record._make(_RECORD.unpack(record))
    except struct.error:
        raise WireError(f"a record has {RECORD_BYTES} bytes, got {len(record)}") from None
    if fields[6] != MAGIC or not DATA <= fields[5] <= BYE:
        raise WireError(f"bytes {bytes(record).hex()} are not a record")
    return fields


def is_newer(epoch: int, than: int) -> bool:
    """Return whether an epoch is later than another; epochs are counted modulo 2**32.

    >>> is_newer(3, 2), is_newer(2, 2), is_newer(1, 2**32 - 1)
    (True, False, True)
    """
    return 0 < (epoch - than) % EPOCHS < EPOCHS // 2
