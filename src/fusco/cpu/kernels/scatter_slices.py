"""Scatter the rows of all sources from the pools of a node to their slots, as far as they have arrived."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fusco.control.flags import load_acquire_at
from fusco.core.compiled import compiled
from fusco.cpu.kernels.intrinsics import copy_memory


class SourceRows(NamedTuple):
    """Rows of one source in a pool of this node; integers, or arrays of those of all sources."""

    flag: Any  # address of the flag that announces them
    before: Any  # its value while none is there
    rows_per_step: Any  # rows that every further increment announces
    pool: Any  # address of the first row
    first_row: Any  # its index among the node's rows
    num_rows: Any  # number of rows
    is_of_peer: Any  # 1 if they are in the pool of another rank


class Scattered(NamedTuple):
    """Result of ``scatter_slices``: rows done now, those of them read from other ranks, sources still to do."""

    num_rows: int
    num_peer_rows: int
    num_sources_left: int


def scatter_slices(
    sources: npt.NDArray[np.int64],
    num_done: npt.NDArray[np.int64],
    pair_to_slot: torch.Tensor,
    row_to_first_pair: torch.Tensor,
    outputs: npt.NDArray[np.int64],
    row_bytes: int,
    rows_per_slice: int,
) -> Scattered:
    """Copy rows from pools to their slots, each read once; return after about a slice, or when no more are there.

    Args:
        sources: int64 (num_sources, 7), a ``SourceRows`` each, in the order in which to look for rows.
        num_done: int64 (num_sources,), rows of each that are done; changed in place.
        pair_to_slot: int64 (P,), slot of each pair.
        row_to_first_pair: int64 (M + 1,); row ``i`` has pairs ``row_to_first_pair[i]`` to ``[i + 1]``.
        outputs: int64 (num_outputs, 3): address of slot 0, bytes of a slot, and their offset in the row.
        row_bytes: bytes of a row in a pool.
        rows_per_slice: rows to copy before a flag is read again.
    """
    tables = pair_to_slot.numpy(), row_to_first_pair.numpy()
    return Scattered(*_scatter_slices(sources, num_done, *tables, outputs, row_bytes, rows_per_slice))


@compiled(nogil=True)
def _scatter_slices(
    sources: Any,
    num_done: Any,
    pair_to_slot: Any,
    row_to_first_pair: Any,
    outputs: Any,
    row_bytes: int,
    rows_per_slice: int,
) -> Any:
    num_rows_done, num_peer_rows, num_left = 0, 0, 0
    for i in range(sources.shape[0]):
        flag, before, rows_per_step, pool = sources[i, 0], sources[i, 1], sources[i, 2], sources[i, 3]
        first_row, num_rows, is_of_peer = sources[i, 4], sources[i, 5], sources[i, 6]
        while num_done[i] < num_rows and num_rows_done < rows_per_slice:
            available = min(num_rows, (load_acquire_at(flag) - before) * rows_per_step)
            if available <= num_done[i]:
                break
            end = min(num_done[i] + rows_per_slice, available)
            for row in range(first_row + num_done[i], first_row + end):
                pair, last = row_to_first_pair[row], row_to_first_pair[row + 1]
                if pair < last:
                    num_peer_rows += is_of_peer
                origin = pool + (row - first_row) * row_bytes
                for p in range(pair, last):
                    for o in range(outputs.shape[0]):
                        num_bytes = outputs[o, 1]
                        copy_memory(outputs[o, 0] + pair_to_slot[p] * num_bytes, origin + outputs[o, 2], num_bytes)
            num_rows_done += end - num_done[i]
            num_done[i] = end
        if num_done[i] < num_rows:
            num_left += 1
    return num_rows_done, num_peer_rows, num_left
