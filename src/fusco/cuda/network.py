"""Messages between nodes on a stream of their own, and a thread that ends them when nobody comes.

A kernel of NCCL's waits for its peer without a limit, and so does whoever waits for the stream behind it. The guard
gives up when nothing has arrived for as long as the limit, when a rank has died or left, or when NCCL says that the
network failed: it aborts NCCL, so that streams go on, and keeps the words for the error that the next call raises.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from fusco.control.store_gather import StoreGather
from fusco.control.threads import within
from fusco.control.watchdog import Watchdog
from fusco.core.errors import Stall, TransportError
from fusco.cuda.nccl import Message, NcclTransport
from fusco.cuda.tuning import channels_per_peer

_BETWEEN_LOOKS_S = 0.02
_ENDING = 0.25  # of the limit, for each step of the end: NCCL frees device memory, which waits for anybody's kernels


def messages_of(memories: Iterable[tuple[int, torch.Tensor]]) -> list[Message]:
    """One for each rank and its memory, none where there is nothing to send."""
    return [Message(peer, memory.data_ptr(), memory.nbytes) for peer, memory in memories if memory.nbytes]


@dataclass(frozen=True)
class _UnderWay:
    is_done: Callable[[], bool]
    stall: Stall


class Network:
    """Sends and receives device memory between ranks of different nodes, in the order of calls."""

    def __init__(
        self,
        store_gather: StoreGather,
        watchdog: Watchdog,
        stream: torch.cuda.Stream,
        num_remote_nodes: int,
        timeout_s: float,
        on_stall: Callable[[], None],
    ) -> None:
        """Connect, together with all ranks.

        Args:
            store_gather: finds them.
            watchdog: waits for them.
            stream: on which messages travel.
            num_remote_nodes: to how many nodes they go.
            timeout_s: after how long without progress NCCL is ended.
            on_stall: called just before that.

        """
        device = stream.device
        self._nccl = NcclTransport(
            store_gather, device, watchdog.wait_until, channels_per_peer=channels_per_peer(num_remote_nodes)
        )
        self._watchdog = watchdog
        self._device, self._ending_s = device, _ENDING * timeout_s
        self.stream = stream
        self.nccl_watchdog = NcclWatchdog(self._nccl, watchdog, timeout_s, device, on_stall)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> torch.cuda.Event:
        """Launch messages that travel side by side; the event is recorded once they are through."""
        peers = tuple(sorted({message.peer for message in (*sends, *receives)}))
        num_bytes = sum(message.num_bytes for message in receives)
        stall = Stall("the network", peers, what, f"not all of {num_bytes:,} bytes")
        has_launched = threading.Event()
        self.nccl_watchdog.watch_over(has_launched.is_set, stall)
        try:
            self._nccl.exchange(sends, receives, self.stream.cuda_stream)
        except TransportError as error:
            self._watchdog.ask_everybody(stall, str(error))
            raise  # though all ranks live
        has_launched.set()
        done = torch.cuda.Event()
        done.record(self.stream)
        self.nccl_watchdog.watch_over(done.query, stall)
        return done

    def finish(self) -> None:
        """Give everything back, together with all ranks, once nothing is under way on any."""
        self.nccl_watchdog.close()
        self._end(self._nccl.finish)

    def close(self) -> None:
        """Give everything back; what is still under way is ended."""
        self.nccl_watchdog.close()
        self._end(self._nccl.abort)

    def _end(self, end: Callable[[], None]) -> None:
        def in_thread() -> None:
            enter_device(self._device)
            end()

        if not within(self._ending_s, in_thread):
            warnings.warn(
                f"NCCL has not given back what it has on {self._device} within {self._ending_s:.1f} s: a rank, or a "
                f"kernel on the device, is in its way. A thread goes on waiting for it",
                stacklevel=2,
            )


class NcclWatchdog:
    """Watches over what is under way on the network."""

    def __init__(
        self,
        nccl: NcclTransport,
        watchdog: Watchdog,
        timeout_s: float,
        device: torch.device,
        on_stall: Callable[[], None],
    ) -> None:
        """``on_stall`` is called, in the guard's thread, when it gives up and before it ends NCCL."""
        self._nccl, self._watchdog, self._timeout_s, self._device = nccl, watchdog, timeout_s, device
        self._on_stall = on_stall
        self._under_way: deque[_UnderWay] = deque()
        self._since_progress = time.monotonic()
        self._has_work, self._is_closed = threading.Event(), False
        self.stall: Stall | None = None  # what was waited for when the guard gave up
        self._thread = threading.Thread(target=self._run, name="fusco network guard", daemon=True)
        self._thread.start()

    def watch_over(self, is_done: Callable[[], bool], stall: Stall) -> None:
        """Give up if ``is_done`` stays false while nothing else gets done either."""
        if not self._under_way:
            self._since_progress = time.monotonic()
        self._under_way.append(_UnderWay(is_done, stall))
        self._has_work.set()

    def close(self) -> None:
        """End the thread. One that ends NCCL is not waited for beyond a limit."""
        self._is_closed = True
        self._has_work.set()
        self._thread.join(_ENDING * self._timeout_s)

    def _run(self) -> None:
        try:
            enter_device(self._device)
            self._look_after_network()
        except Exception as error:  # noqa: BLE001  nobody would look after the network any more
            seen = f"{type(error).__name__}: {error}"
            self._give_up(Stall("looking after the network", (), "its state", seen))

    def _look_after_network(self) -> None:
        while not self._is_closed:
            if not self._under_way:
                self._has_work.wait()
                self._has_work.clear()
                continue
            oldest = self._under_way[0]
            if oldest.is_done():
                self._under_way.popleft()
                self._since_progress = time.monotonic()
                continue
            if self._is_in_vain():
                self._give_up(oldest.stall)
                return
            time.sleep(_BETWEEN_LOOKS_S)

    def _give_up(self, stall: Stall) -> None:
        self.stall = stall
        self._under_way.clear()
        self._on_stall()
        self._nccl.abort()

    def _is_in_vain(self) -> bool:
        is_late = time.monotonic() - self._since_progress > self._timeout_s
        return is_late or self._watchdog.is_anybody_gone or bool(self._nccl.failure)


def enter_device(device: torch.device) -> None:
    """Make ``device`` current in this helper thread without invalidating a CUDA-graph capture in another thread.

    ``torch.cuda.graph`` captures in global mode, in which even an event query in any other thread fails and
    invalidates the capture. A thread in thread-local mode is exempt. ``TransportError`` if the mode cannot be set.
    """
    if not torch.cuda.is_available():
        return  # the device is simulated
    from cuda.bindings import driver  # noqa: PLC0415  of the extra fusco[cuda]

    torch.cuda.set_device(device)
    thread_local = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    result, _ = driver.cuThreadExchangeStreamCaptureMode(thread_local)
    if int(result):
        raise TransportError(f"a thread for {device} could not set its stream capture mode: {result.name}")
