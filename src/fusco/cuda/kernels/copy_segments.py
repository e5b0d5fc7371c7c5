"""The kernel ``copy_segments``: copy scattered segments of device memory to scattered places."""

from __future__ import annotations

import torch

from fusco.cuda.kernels.abi import I64, POINTER, pinned, struct
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.tuning import COPY_BLOCKS_PER_SM, COPY_THREADS, copy_piece_bytes

# ``CopyArgs`` of copy_segments.cu.
CopyArgs = struct("CopyArgs", (POINTER, "src dst segments"), (I64, "num_segments piece_bytes"))


def copy_segments(
    launcher: Launcher,
    src: torch.Tensor,
    src_offset: torch.Tensor,
    dst: torch.Tensor,
    dst_offset: torch.Tensor,
    num_bytes: torch.Tensor,
    num_sms: int | None = None,
) -> None:
    """Copy ``src[src_offset[i]:][:num_bytes[i]]`` to ``dst[dst_offset[i]:][:num_bytes[i]]`` for every ``i``.

    Both memories are uint8, on the device or a peer's, and do not overlap. Offsets and sizes are in bytes, int64
    (num_segments,) on the host. They are not checked: callers build them from plans or from checked ``Segments``. A
    single segment is left to the driver, others take at most ``num_sms`` SMs, by default all.
    """
    if len(num_bytes) == 1:
        # The case of nearly all messages: it needs no table on the device.
        begin, first, size = int(dst_offset), int(src_offset), int(num_bytes)
        dst[begin : begin + size].copy_(src[first : first + size])
        return
    ends = num_bytes.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    if not total:
        return
    library = launcher.library
    # From pinned memory, which stays allocated until the stream has read it.
    table = pinned(torch.stack([src_offset, dst_offset, ends]), library.device).to(library.device, non_blocking=True)
    max_grid = launcher.sms(num_sms) * COPY_BLOCKS_PER_SM
    piece_bytes = copy_piece_bytes(total, max_grid)
    arguments = CopyArgs(src.data_ptr(), dst.data_ptr(), table.data_ptr(), len(ends), piece_bytes)
    grid = min(-(-total // piece_bytes), max_grid)
    launcher.launch("copy_segments", {}, arguments, grid=grid, num_threads=COPY_THREADS)
