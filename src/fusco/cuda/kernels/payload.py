"""Rows that kernels move, as bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Rows to be moved: where this rank has them, bytes of a row, and where they go."""

    address: int
    row_bytes: int
    output_address: int = 0
