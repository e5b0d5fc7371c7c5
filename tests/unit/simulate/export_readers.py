"""Readers of exports: the bytes that ranks send each other by a file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fusco.core.lanes import IntArray
from fusco.simulate.export import _ATTR, _ATTR_NAME, _RECV, _SEND, _TYPE, _TYPES, file_of

_TRANSFER = re.compile(r"l(\d+): (send|recv) (\d+)b (?:to|from) (\d+) tag (\d+)")
_CONNECTION = re.compile(r"(\d+)->(\d+) id \d+ (?:start 0|trigger \d+) size (\d+)(?: send_done_trigger \d+)?")


def read_goal(path: Path) -> IntArray:
    """Return the bytes that ranks send each other, int64 (R, R); ``ValueError`` if a receive differs from its send."""
    lines = path.read_text(encoding="utf-8").splitlines()
    num_ranks, rank = int(lines[0].split()[1]), -1
    tables = {kind: np.zeros((num_ranks, num_ranks), np.int64) for kind in ("send", "recv")}
    for line in lines:
        if line.startswith("rank "):
            rank = int(line.split()[1])
        elif found := _TRANSFER.fullmatch(line):
            _, kind, size, peer, _ = found.groups()
            ends = (rank, int(peer)) if kind == "send" else (int(peer), rank)
            tables[kind][ends] += int(size)
    if not np.array_equal(tables["send"], tables["recv"]):
        raise ValueError(f"{path}: sends and receives differ")
    return tables["send"]


def read_htsim(path: Path) -> IntArray:
    """Return the bytes that ranks send each other, int64 (R, R); ``ValueError`` if connections are missing."""
    lines = path.read_text(encoding="utf-8").splitlines()
    num_ranks, num_connections = (int(line.split()[1]) for line in lines[:2])
    matrix = np.zeros((num_ranks, num_ranks), np.int64)
    found = [match for line in lines if (match := _CONNECTION.fullmatch(line))]
    for match in found:
        src, dst, size = map(int, match.groups())
        matrix[src, dst] += size
    if len(found) != num_connections:
        raise ValueError(f"{path} has {len(found)} connections, its head says {num_connections}")
    return matrix


def read_chakra(path: Path, num_ranks: int) -> IntArray:
    """Return the bytes that ranks send each other, int64 (R, R); ``ValueError`` if receives differ from sends."""
    tables = {kind: np.zeros((num_ranks, num_ranks), np.int64) for kind in (_SEND, _RECV)}
    for rank in range(num_ranks):
        content, at, is_first = file_of(path, rank).read_bytes(), 0, True
        while at < len(content):
            size, at = _read_varint(content, at)
            message, at = content[at : at + size], at + size
            if not is_first:
                kind, values = _read_node(message)
                tables[kind][values["comm_src"], values["comm_dst"]] += values["comm_size"]
            is_first = False
    if not np.array_equal(tables[_SEND], tables[_RECV]):
        raise ValueError(f"{path}: sends and receives differ")
    return tables[_SEND]


def _read_node(message: bytes) -> tuple[int, dict[str, int]]:
    kind, values = 0, {}
    for number, value in _fields(message):
        if number == _TYPE:
            assert isinstance(value, int)
            kind = value
        elif number == _ATTR:
            assert isinstance(value, bytes)
            of = dict(_fields(value))
            name = of[_ATTR_NAME]
            assert isinstance(name, bytes)
            size = of[_TYPES[name.decode()]]
            assert isinstance(size, int)
            values[name.decode()] = size
    return kind, values


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        value, at = _read_varint(message, at)
        if key & 7 == 0:
            yield key >> 3, value
        else:
            yield key >> 3, message[at : at + value]
            at += value


def _read_varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (content[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if content[at - 1] < 128:
            return value, at
