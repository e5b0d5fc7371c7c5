"""Work captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def captured(work: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Run the work once, capture it, and yield what replays it; all replays have ended after the block."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # In the other modes of a capture NCCL's watchdog, another thread, may not query its events.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    yield graph.replay
    torch.cuda.synchronize()
