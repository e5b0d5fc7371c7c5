"""The kernel ``node_barrier``: wait for all ranks of the node, on a stream."""

from __future__ import annotations

import ctypes
from functools import cache

from fusco.cuda.kernels.abi import struct
from fusco.cuda.kernels.comm import comm_type
from fusco.cuda.kernels.launcher import Launcher

_NUM_THREADS = 32


@cache
def barrier_type(num_ranks: int) -> type[ctypes.Structure]:
    """``BarrierArgs`` of node_barrier.cu."""
    return struct("BarrierArgs", (comm_type(num_ranks), "comm"))


def node_barrier(launcher: Launcher) -> None:
    """Make the stream wait until the streams of all ranks of the node have come here.

    What each of them has stored in any rank's memory before is visible to all afterwards.
    """
    arguments = barrier_type(launcher.num_ranks)(comm=launcher.comm)
    launcher.launch("node_barrier", {}, arguments, grid=1, num_threads=_NUM_THREADS)
