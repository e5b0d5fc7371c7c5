"""Chakra execution traces: a file of protobuf messages for each rank, of sends and receives with dependencies.

Chakra has no all-to-all of unequal parts (mlcommons/chakra #209), so messages are ``COMM_SEND_NODE`` and
``COMM_RECV_NODE``. The encoder knows what is needed of ``et_def.proto``: each message is preceded by its length; the
first is ``GlobalMetadata``. Protobuf: field number and wire type in one varint, then a varint or a length and bytes.
Chakra's feeder reads each attribute from the field of one type, and takes what has another type as 0.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fusco.core.files import written_beside
from fusco.simulate.messages import Messages

_VERSION = "0.0.4"
_SEND, _RECV = 5, 6  # NodeType
_ID, _NAME, _TYPE, _DATA_DEPS, _ATTR = 1, 2, 3, 5, 10  # fields of Node
_ATTR_NAME, _INT32, _INT64, _BOOL = 1, 7, 9, 27  # fields of AttributeProto: name, int32_val, int64_val, bool_val
_TYPES = {"comm_size": _INT64, "comm_src": _INT32, "comm_dst": _INT32, "comm_tag": _INT32, "is_cpu_op": _BOOL}


def write_chakra(messages: Messages, path: Path) -> None:
    """Write ``NAME.RANK.et`` for each rank; ``path`` is ``NAME.et``."""
    for rank in range(messages.num_ranks):
        nodes = [_bytes(1, _VERSION.encode())]
        for i in np.flatnonzero((messages.src == rank) | (messages.dst == rank)).tolist():
            is_send = messages.src[i] == rank
            awaited = messages.awaited(i).tolist() if is_send else []
            node = _int(_ID, 2 * i + (not is_send)) + _bytes(_NAME, f"message {i}".encode())
            node += _int(_TYPE, _SEND if is_send else _RECV)
            node += _bytes(_DATA_DEPS, b"".join(_varint(2 * each + 1) for each in awaited)) if awaited else b""
            values = (messages.num_bytes[i], messages.src[i], messages.dst[i], i, False)  # as in _TYPES
            for (name, field), value in zip(_TYPES.items(), values, strict=True):
                node += _bytes(_ATTR, _bytes(_ATTR_NAME, name.encode()) + _int(field, int(value)))
            nodes.append(node)
        with written_beside(file_of(path, rank)) as beside:
            beside.write_bytes(b"".join(_varint(len(each)) + each for each in nodes))


def file_of(path: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return path.with_name(f"{path.stem}.{rank}{path.suffix}")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def _int(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _bytes(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value
