"""Times of calls, as short as a machine that does other things, too, lets them be."""

import time

import numpy as np


def least_median_us(function, inputs):
    """Return the median of a call's microseconds over the inputs, the least of 20 such medians."""

    def median_us():
        times = []
        for each in inputs:
            start = time.perf_counter()
            function(each)
            times.append((time.perf_counter() - start) * 1e6)
        return np.median(times)

    return min(median_us() for _ in range(20))
