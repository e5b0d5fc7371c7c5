"""Exports of a collective's messages for the field's simulators.

``goal``: ATLAHS and LogGOPSim. ``htsim``: connection matrices of csg-htsim. ``chakra``: execution traces of ASTRA-sim.
LogGOPSim has run its files, csg-htsim's reader has read its own; ASTRA-sim was not run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fusco.core.files import written_beside
from fusco.core.lanes import IntArray
from fusco.simulate.flows import MOST_FLOWS, Hop, Program

_VERSION = "0.0.4"
_SEND, _RECV = 5, 6  # NodeType
_ID, _NAME, _TYPE, _DATA_DEPS, _ATTR = 1, 2, 3, 5, 10  # fields of Node
_ATTR_NAME, _INT32, _INT64, _BOOL = 1, 7, 9, 27  # fields of AttributeProto: name, int32_val, int64_val, bool_val
_TYPES = {"comm_size": _INT64, "comm_src": _INT32, "comm_dst": _INT32, "comm_tag": _INT32, "is_cpu_op": _BOOL}


def write_chakra(messages: Messages, path: Path) -> None:
    """Write ``NAME.RANK.et`` for each rank, protobuf messages of sends and receives; ``path`` is ``NAME.et``.

    Chakra has no all-to-all of unequal parts (mlcommons/chakra #209), so messages are ``COMM_SEND_NODE`` and
    ``COMM_RECV_NODE``. Each is preceded by its length; the first is ``GlobalMetadata``. Protobuf: field number and wire
    type in one varint, then a varint or a length and bytes. Chakra's feeder reads each attribute from the field of one
    type, and takes what has another type as 0.
    """
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


def write_htsim(messages: Messages, path: Path) -> None:
    """Write a connection for each message; those of a hop start when a barrier of its last earlier hop has ended.

    A connection has one trigger that it counts down, so hops wait as wholes: later than messages do here. csg-htsim
    reads sizes as 32-bit integers: ``ValueError`` for a message that is larger.

    ``Nodes``, ``Connections`` and ``Triggers`` are counts; a connection is ``src->dst id i start 0 size s``, or has
    ``trigger t`` in place of ``start``, and ``send_done_trigger t``. A trigger is ``barrier`` of ``count`` connections.
    """
    if (most := int(messages.num_bytes.max(initial=0))) >= 1 << 31:
        raise ValueError(f"csg-htsim reads connections below 2 GiB, this has one of {most:,} bytes")
    starts = [max(after, default=-1) for after in messages.after]
    awaited = {each: i + 1 for i, each in enumerate(sorted({start for start in starts if start >= 0}))}
    counts = np.bincount(messages.hop, minlength=len(starts))
    lines = [f"Nodes {messages.num_ranks}", f"Connections {len(messages.hop)}", f"Triggers {len(awaited)}"]
    for i, (hop, src, dst, size) in enumerate(
        zip(
            *(column.tolist() for column in (messages.hop, messages.src, messages.dst, messages.num_bytes)), strict=True
        )
    ):
        start = f"trigger {awaited[starts[hop]]}" if starts[hop] >= 0 else "start 0"
        done = f" send_done_trigger {awaited[hop]}" if hop in awaited else ""
        lines.append(f"{src}->{dst} id {i + 1} {start} size {size}{done}")
    lines += [f"trigger id {number} barrier count {counts[hop]}" for hop, number in awaited.items()]
    with written_beside(path) as beside:
        beside.write_text("\n".join([*lines, ""]), encoding="utf-8")


def write_goal(messages: Messages, path: Path) -> None:
    """Write a program: message ``i`` is label ``2 i`` of its sender and ``2 i + 1`` of its receiver, with tag ``i``.

    The syntax is that of LogGOPSim (Hoefler et al., 2010), whose txt2bin (commit 76451de) read such files: ``l1: send
    8b to 1 tag 3``, ``l2 requires l1``, a label before it is required, and no line indented.
    """
    lines = [f"num_ranks {messages.num_ranks}", ""]
    for rank in range(messages.num_ranks):
        lines.append(f"rank {rank} {{")
        for i in np.flatnonzero((messages.src == rank) | (messages.dst == rank)).tolist():
            size = int(messages.num_bytes[i])
            if messages.src[i] == rank:
                lines.append(f"l{2 * i}: send {size}b to {messages.dst[i]} tag {i}")
                lines += [f"l{2 * i} requires l{2 * each + 1}" for each in messages.awaited(i).tolist()]
            else:
                lines.append(f"l{2 * i + 1}: recv {size}b from {messages.src[i]} tag {i}")
        lines += ["}", ""]
    with written_beside(path) as beside:
        beside.write_text("\n".join(lines), encoding="utf-8")


_SUFFIX_TO_WRITER = {".goal": write_goal, ".cm": write_htsim, ".et": write_chakra}


def write_export(messages: Messages, path: Path) -> list[Path]:
    """Write messages in the format of the suffix, and return the files.

    ``.goal``, ``.cm`` or ``.et``, of which each rank has a file, ``NAME.RANK.et``.
    """
    check_export(path)
    _SUFFIX_TO_WRITER[path.suffix](messages, path)
    return [file_of(path, rank) for rank in range(messages.num_ranks)] if path.suffix == ".et" else [path]


def check_export(path: Path) -> None:
    """Raise ``ValueError`` for a suffix that is none of the formats'."""
    if path.suffix not in _SUFFIX_TO_WRITER:
        raise ValueError(f"an export is a file {', '.join(_SUFFIX_TO_WRITER)}, got {path}")


@dataclass(frozen=True, eq=False)
class Messages:
    """Messages by number, int64 (M,) each, in order of hops; those of one hop that have bytes.

    ``hop`` is the number of a message's hop. A message waits for all messages of the hops in ``after`` of its hop
    that its source receives.
    """

    hop: IntArray
    src: IntArray
    dst: IntArray
    num_bytes: IntArray
    after: tuple[tuple[int, ...], ...]
    num_ranks: int

    def awaited(self, message: int) -> IntArray:
        """Return the messages that must have arrived at a message's source before it is sent."""
        earlier = np.isin(self.hop, self.after[self.hop[message]])
        return np.flatnonzero(earlier & (self.dst == self.src[message]))


def messages_of(program: Program, num_ranks: int) -> Messages:
    """Return the messages of a program; passes over memory are left out, and so are links: routes are the reader's.

    What another rank's NIC sends or receives is a message of its own, after the one that brings it there. Raises
    ``ValueError`` for more than ``MOST_FLOWS`` whose flows are merged.
    """
    if program.is_merged:
        raise ValueError(f"{program.num_flows:,} messages are too many to write, at most {MOST_FLOWS:,} are")
    parts: list[Hop] = []
    after: list[tuple[int, ...]] = []
    last: dict[int, tuple[int, ...]] = {}  # by hop of the program, the parts that end it
    for i in _in_order(program):
        hop = program.hops[i]
        before = tuple(part for each in hop.after for part in last[each])
        num_before = len(before)
        if hop.kind in ("memory", "cores"):
            last[i] = before
            continue
        ends = [hop.src, hop.src if hop.via is None else hop.via, hop.dst if hop.until is None else hop.until, hop.dst]
        for src, dst, kind in zip(ends, ends[1:], ("within", hop.kind, "within"), strict=False):
            moves = (src != dst) & (hop.num_bytes > 0)
            if not moves.any():
                continue
            parts.append(Hop(name=hop.name, kind=kind, src=src[moves], dst=dst[moves], num_bytes=hop.num_bytes[moves]))
            after.append(before)
            before = (*before, len(parts) - 1)
        last[i] = before[-1:] if len(before) > num_before else ()
    number = np.repeat(np.arange(len(parts)), [len(part.src) for part in parts])
    nothing = np.zeros(0, np.int64)
    columns = [np.concatenate([nothing, *(getattr(p, name) for p in parts)]) for name in ("src", "dst", "num_bytes")]
    src, dst, num_bytes = columns
    return Messages(number, src, dst, num_bytes, tuple(after), num_ranks)


def _in_order(program: Program) -> list[int]:
    """Return the hops so that none is before one that it waits for."""
    order: list[int] = []
    while len(order) < len(program.hops):
        order += [i for i, hop in enumerate(program.hops) if i not in order and set(hop.after) <= set(order)]
    return order
