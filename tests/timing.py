"""Times of calls in units of a compiled loop that is measured in turn with them, so that both share slow moments."""

import time

import numba
import numpy as np

_CELLS = np.random.default_rng(0).integers(1, 1 << 20, (16, 16))  # takes 10 us on an idle AMD EPYC


def relative_time(function, inputs):
    """Return the time of a call over that of the loop: means over inputs of the least of all rounds, half a second.

    The loop is repeated for about as long as a call takes, in turn with it, so that a slow moment lengthens both.
    The first calls, which may compile, are not measured.
    """
    np.empty(1 << 24, np.uint8)  # freed: malloc then keeps blocks of this size, which would be paged in for every call
    for _ in range(2):
        call_s, loop_s = _seconds(function, inputs[0]), _loop_s(10) / 10
    num_loops = max(5, round(call_s / loop_s))
    num_rounds = min(1000, max(20, round(0.5 / (len(inputs) * (call_s + num_loops * loop_s)))))
    times_s = [[(_seconds(function, each), _loop_s(num_loops)) for each in inputs] for _ in range(num_rounds)]
    call_s, loop_s = np.min(times_s, axis=0).mean(axis=0)
    return float(call_s / loop_s * num_loops)


def _loop_s(num_loops):
    cells, chosen = np.tile(_CELLS, (num_loops, 1, 1)), np.zeros(len(_CELLS), np.int64)
    return _seconds(_serve_largest, cells, chosen)


def _seconds(function, *arguments):
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


@numba.njit
def _serve_largest(cells, chosen):
    """Find each row's largest cell in a free column, serve the least of these, and again: integers and branches."""
    size = cells.shape[1]
    for rest in cells:
        for _ in range(24):
            free, least = (1 << size) - 1, 1 << 62
            for row in range(size):
                best, largest = -1, -1
                for column in range(size):
                    if (free >> column) & 1 and rest[row, column] > largest:
                        best, largest = column, rest[row, column]
                free ^= 1 << best
                chosen[row] = best
                least = min(least, largest)
            for row in range(size):
                rest[row, chosen[row]] -= least
