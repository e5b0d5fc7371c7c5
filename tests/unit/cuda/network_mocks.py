"""Mocks of what a network uses: NCCL, events, replayed messages."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from unittest import mock

import torch

from fusco.bench.host.null_device import NullEvent, NullGpu, NullStream
from fusco.cuda.between_nodes.nccl import Message
from fusco.cuda.between_nodes.network import Network, ReplayedMessages

DEVICE = torch.device("cuda", 3)
LIMIT_S, NO_LIMIT_S = 0.3, 600.0
SLACK_S = 5.0  # more than a loaded machine takes for what is to come at once


class Nccl:
    """Mock of ``NcclTransport``; with ``hangs``, a launch blocks until it is aborted."""

    def __init__(self, channels_per_peer=None) -> None:
        self.channels_per_peer = channels_per_peer
        self.failure, self.aborts, self.finishes, self.launches, self.hangs = "", [], [], [], False
        self.has_aborted = threading.Event()

    def exchange(self, sends, receives, stream) -> None:
        self.launches.append((sends, receives, stream))
        if self.hangs:
            self.has_aborted.wait(10 * SLACK_S)

    def abort(self) -> None:
        self.aborts.append(time.monotonic())
        self.has_aborted.set()

    def finish(self) -> None:
        self.finishes.append(time.monotonic())


class Watchdog:
    has_failed_rank = has_departed_rank = False

    def wait_until(self, is_ready, stall) -> None:
        raise AssertionError("unexpected wait")


class Gpu(NullGpu):
    """GPU whose events a test completes; ``is_captured`` says whether a graph captures what is launched."""

    def __init__(self) -> None:
        super().__init__(DEVICE)
        self.events: list[Event] = []
        self.stream, self.is_captured = Stream(self), False
        self.is_capturing = lambda: self.is_captured

    def connect(self, _store_gather, _wait_until, channels_per_peer):
        return Nccl(channels_per_peer)


class Event(NullEvent):
    """Event that a test completes."""

    def __init__(self, stream) -> None:
        self.stream, self.is_done = stream, False

    def query(self) -> bool:
        return self.is_done


class Stream(NullStream):
    """Stream that keeps its events."""

    cuda_stream = 77

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def record_event(self) -> Event:
        self._gpu.events.append(Event(self))
        return self._gpu.events[-1]


class OnHost(ReplayedMessages):
    """Replayed messages of which a test tells."""

    def __init__(self, _gpu) -> None:
        super().__init__(NullGpu())
        self.calls = []

    def begin(self, stream, peers) -> None:
        self.calls.append(("begin", stream))
        self._peers.update(peers)

    def end(self, stream) -> None:
        self.calls.append(("end", stream))

    def replay(self, *, is_done: bool) -> None:
        """Write what the device writes."""
        self._memory[:1].copy_(self._waiting)
        if is_done:
            self._memory.copy_(self._done)


@contextmanager
def network_to(num_remote_nodes):
    gpu = Gpu()
    with mock.patch("fusco.cuda.between_nodes.network.ReplayedMessages", OnHost):
        network = Network(gpu, mock.Mock(), Watchdog(), gpu.stream, num_remote_nodes, LIMIT_S, on_stall=mock.Mock())
        yield network
        network.close()


SENDS, RECEIVES = [Message(3, 100, 10)], [Message(2, 200, 1500), Message(3, 300, 500)]
