"""CPU loop of ``copy_segments``: one ``memcpy`` a segment."""

from __future__ import annotations

from typing import Any

from fusco.core.compiled import compiled
from fusco.cpu.kernels.intrinsics import copy_bytes


@compiled(nogil=True)
def copy_segments(src: Any, src_offset: Any, dst: Any, dst_offset: Any, num_bytes: Any) -> None:
    """See ``fusco.cpu.kernels.copy_segments``."""
    for i in range(num_bytes.size):
        copy_bytes(dst, dst_offset[i], src, src_offset[i], num_bytes[i])
