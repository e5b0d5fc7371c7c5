"""Definitions that Python and the CUDA sources share: struct fields, chunk sizes, element types, rows as bytes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

U32, I32, I64, U64 = ctypes.c_uint32, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64
POINTER = ctypes.c_uint64  # an integer, so that torch's addresses fit without a cast

# Granularity of signalling: one ready flag per chunk in each rank's arena.
CHUNK_PAIRS = 512  # expert ids per chunk of routing

WARP_SIZE = 32

ELEMENT_TYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}


def struct(name: str, *fields: tuple[Any, str]) -> type[ctypes.Structure]:
    """Return a struct: of each type, in order, the fields that the text names.

    >>> struct("Pair", (I64, "first second"))(second=2).second
    2
    """
    named = [(field, kind) for kind, names in fields for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": named})


def ticket_after(ticket: int) -> int:
    """Return the number of the next launch that the host waits for: 32 bits, and never 0, which waits for none.

    >>> ticket_after(0), ticket_after(2**32 - 1)
    (1, 1)
    """
    return ticket % (2**32 - 1) + 1


@dataclass(frozen=True)
class Value:
    """A number that is given when a program is run: the one of this index, plus a number that is known before.

    >>> Value(3) + 16
    Value(index=3, plus=16)
    """

    index: int
    plus: int = 0

    def __add__(self, number: int) -> Value:
        return Value(self.index, self.plus + number)


#: An argument of a kernel, often an address.
Number: TypeAlias = int | Value


class Payload(NamedTuple):
    """Rows to move, as bytes: their address on this rank, the bytes of a row, and address and rows of the output."""

    address: Number
    row_bytes: int
    output_address: Number = 0
    num_output_rows: Number = 0


class RowsAt(NamedTuple):
    """Rows of elements, one behind the other: address, dtype, and elements of a row."""

    address: Number
    dtype: torch.dtype
    hidden: int

    @classmethod
    def of(cls, rows: torch.Tensor) -> RowsAt:
        """Return where rows (num_rows, hidden) are."""
        return cls(rows.data_ptr(), rows.dtype, rows.shape[1])


class Memory(Protocol):
    """Contiguous elements on the device: a tensor, or what knows no more than a kernel needs."""

    def data_ptr(self) -> Number:
        """Return the address."""

    def element_size(self) -> int:
        """Return the bytes of an element."""


class MemoryAt(NamedTuple):
    """``Memory`` at an address: a view of a tensor would take longer to make than a kernel to launch."""

    address: Number
    item_bytes: int

    def data_ptr(self) -> Number:
        return self.address

    def element_size(self) -> int:
        return self.item_bytes


def address(memory: Memory | None) -> Number:
    """Return the address of a tensor, or 0 for ``None``."""
    return 0 if memory is None else memory.data_ptr()


def vector_bytes(row_bytes: int) -> int:
    """Return the widest vector access, in bytes, that divides a row."""
    return min(16, row_bytes & -row_bytes)


def pinned(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return host memory that a device reads and writes: pinned, if the device is not the CPU in its place."""
    return memory.pin_memory() if device.type == "cuda" else memory
