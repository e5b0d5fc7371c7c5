"""Numbers of rows for each expert as records of ranks hold them: 16 bits each, the low halves of 32.

Shapes: R ranks, E counts of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fusco.core.lanes import IntArray


def halves_of(counts: IntArray) -> npt.NDArray[np.uint16]:
    """Return the low and the high 16 bits of counts below 2**32, and behind the low ones, if any high ones are not 0.

    >>> halves_of(np.array([5, 65538])).tolist(), halves_of(np.array([5])).tolist()
    ([[5, 2, 1], [0, 1, 0]], [[5, 0], [0, 0]])
    """
    halves = np.zeros((2, len(counts) + 1), np.uint16)
    halves[0, :-1], halves[1, :-1] = counts & 0xFFFF, counts >> 16
    halves[0, -1] = halves[1].any()
    return halves


def num_packed(num_counts: int) -> int:
    """Return the integers that the low halves of so many counts take, and what is behind them."""
    return num_counts // 4 + 1


def packed(halves: npt.NDArray[np.uint16]) -> list[int]:
    """Return numbers of 16 bits, four in each integer."""
    words = np.zeros(-(-len(halves) // 4), np.int64)
    words.view(np.uint16)[: len(halves)] = halves
    return words.tolist()


def unpacked(counts: Sequence[Sequence[int]]) -> IntArray:
    """Return the numbers of all ranks, int64 (R, E), perhaps with columns of zeros at the end."""
    return np.array(counts, dtype=np.int64).reshape(len(counts), -1).view(np.uint16).astype(np.int64)
