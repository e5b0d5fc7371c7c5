"""NCCL send and receive on a dedicated stream, with a watchdog thread that aborts NCCL on timeout.

An NCCL kernel waits for its peer without a limit, and so does all later work on its stream. The watchdog thread gives
up when no message has completed within the time limit, when a rank has died, a second after one has left, or when NCCL
reports an error. It aborts NCCL, so that streams continue, and keeps the stall for the error that the next call raises.
Messages that were captured in a CUDA graph are watched as long as the communicator lives.
"""

from __future__ import annotations

import ctypes
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from fusco.control.member_gather import Gather
from fusco.control.watchdog import Grace, Watchdog
from fusco.core.errors import Stall, TransportError
from fusco.core.threads import limit_now, within
from fusco.cuda.between_nodes.nccl import Message, NcclTransport
from fusco.cuda.gpu import Gpu
from fusco.cuda.kernels.abi import pinned
from fusco.cuda.kernels.program import NativeCall
from fusco.cuda.tuning import channels_per_peer

_POLL_INTERVAL_S = 0.02
# Fraction of the time limit for each step of closing. NCCL frees device memory, which waits for all kernels.
_ENDING = 0.25
# NCCL keeps what graphs use until they are deleted. If they are, it ends sooner than this; source not recorded.
_ENDING_WITH_GRAPHS_S = 0.5
_IS_WAITING, _IS_OLD = range(2)


def messages_of(memories: Iterable[tuple[int, torch.Tensor]]) -> list[Message]:
    """Return a message for each rank and its memory, except for empty memory."""
    return [Message(peer, memory.data_ptr(), memory.nbytes) for peer, memory in memories if memory.nbytes]


@dataclass(eq=False)
class _InFlight:
    """Messages that the watchdog waits for. Not frozen, as that makes objects three times as slowly."""

    is_done: Callable[[], bool]  # may be replaced
    stall: Stall
    let_go: Callable[[], object] | None = None  # called once it is done, in the watchdog's thread


class SpareEvents:
    """Events for compiled code to record, used again once they have been reached."""

    def __init__(self) -> None:
        self._spare: deque[torch.cuda.Event] = deque()  # any thread may add one

    def take(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Return an event that exists on the device."""
        if self._spare:
            return self._spare.popleft()
        return stream.record_event()  # it is made when it is first recorded

    def give_back(self, event: torch.cuda.Event) -> None:
        """Keep an event that is not needed any more."""
        self._spare.append(event)


def _stall_of(sends: Sequence[Message], receives: Sequence[Message], what: str) -> Stall:
    peers = tuple(sorted({message.peer for message in (*sends, *receives)}))
    num_bytes = sum(message.num_bytes for message in receives)
    return Stall("the network", peers, what, f"not all of {num_bytes:,} bytes")


class Network:
    """Sends and receives device memory between ranks of different nodes, in order of calls."""

    def __init__(
        self,
        gpu: Gpu,
        store_gather: Gather,
        watchdog: Watchdog,
        stream: torch.cuda.Stream,
        num_remote_nodes: int,
        timeout_s: float,
        on_stall: Callable[[], None],
    ) -> None:
        """Connect, together with all ranks. All messages are on ``stream``, unless ``exchange`` names another one.

        NCCL is aborted after ``timeout_s`` without progress; ``on_stall`` is called just before.
        """
        self._nccl = gpu.connect(store_gather, watchdog.wait_until, channels_per_peer(num_remote_nodes))
        self._watchdog, self._ending_s = watchdog, _ENDING * timeout_s
        self.gpu, self.stream = gpu, stream
        self._replays = ReplayedMessages(gpu)
        self.nccl_watchdog = NcclWatchdog(self._nccl, watchdog, timeout_s, gpu, on_stall)

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], what: str, stream: torch.cuda.Stream | None = None
    ) -> torch.cuda.Event:
        """Launch one group of messages, or capture them; return the event of their completion.

        They are on the network's stream, or on one that comes after all earlier messages and before all later ones.
        """
        stream = stream or self.stream
        is_captured = self.gpu.is_capturing()
        stall = _stall_of(sends, receives, what)
        launching = self.nccl_watchdog.watch(lambda: False, stall)
        if is_captured:
            self._replays.begin(stream, stall.on_ranks)
        try:
            self._nccl.exchange(sends, receives, stream.cuda_stream)
        except TransportError as error:
            self._watchdog.query_all_ranks(stall, str(error))
            raise  # all ranks are alive
        launching.is_done = lambda: True
        if is_captured:
            self._replays.end(stream)
            self.nccl_watchdog.watch_replays(self._replays)
        done: torch.cuda.Event = stream.record_event()
        if not is_captured:
            self.nccl_watchdog.watch(done.query, stall)
        return done

    def prepare(
        self, sends: Sequence[Message], receives: Sequence[Message], what: str, stream: torch.cuda.Stream
    ) -> PreparedMessages:
        """Prepare a group of messages for a program; ranks must be connected."""
        calls = self._nccl.calls(sends, receives, stream.cuda_stream)
        return PreparedMessages(calls, _stall_of(sends, receives, what))

    def launch(
        self,
        call: Callable[[], int],
        stall: Stall,
        is_done: Callable[[], bool],
        let_go: Callable[[], object] | None = None,
    ) -> int:
        """Launch messages by a call, and return its result; ``is_done`` says whether they are complete, afterwards."""
        launching = self.nccl_watchdog.watch(lambda: False, stall, let_go)
        try:
            outcome = self._nccl.launch(call)
        except TransportError as error:
            self._watchdog.query_all_ranks(stall, str(error))
            raise  # all ranks are alive
        if outcome is None:  # it has been aborted, which the wait raises
            self._watchdog.wait_until(lambda: False, lambda: stall)
            raise AssertionError("unreachable")
        launching.is_done = is_done
        return outcome

    def finish(self) -> None:
        """Free NCCL, together with all ranks, once nothing is in flight on any."""
        self.nccl_watchdog.close()
        self._end(self._nccl.finish)

    def close(self) -> None:
        """Abort everything in flight, and free NCCL."""
        self.nccl_watchdog.close()
        self._end(self._nccl.abort)

    def _end(self, end: Callable[[], None]) -> None:
        def in_thread() -> None:
            self.gpu.enter_thread()
            end()

        limit_s = min(self._ending_s, _ENDING_WITH_GRAPHS_S) if self._replays.are_captured else self._ending_s
        if not within(limit_s, in_thread, f"the end of NCCL on {self.gpu.device}") and not self._replays.are_captured:
            warnings.warn(
                f"NCCL has not freed its resources on {self.gpu.device} within {self._ending_s:.1f} s: a rank or a "
                f"kernel on the device has not finished. A background thread keeps waiting for it",
                stacklevel=2,
            )


@dataclass(frozen=True)
class PreparedMessages:
    """Messages that compiled code launches."""

    calls: Sequence[NativeCall]  # see ``NcclTransport.calls``
    stall: Stall  # the wait for them


class NcclWatchdog:
    """Thread that limits the waits of NCCL kernels."""

    def __init__(
        self, nccl: NcclTransport, watchdog: Watchdog, timeout_s: float, gpu: Gpu, on_stall: Callable[[], None]
    ) -> None:
        """``on_stall`` is called in the watchdog thread, before it aborts NCCL."""
        self._nccl, self._watchdog, self._timeout_s, self._gpu = nccl, watchdog, timeout_s, gpu
        self._on_stall = on_stall
        self._in_flight: deque[_InFlight] = deque()
        self._replays: ReplayedMessages | None = None
        self._since_progress = time.monotonic()
        self._is_closed = threading.Event()
        self.stall: Stall | None = None  # the wait that timed out
        self._thread = threading.Thread(target=self._run, name="fusco NCCL watchdog", daemon=True)
        self._thread.start()

    def watch(self, is_done: Callable[[], bool], stall: Stall, let_go: Callable[[], object] | None = None) -> _InFlight:
        """Time out if ``is_done`` stays false and no other watched condition becomes true.

        Waking the thread would cost the caller more than a launch, so the thread looks now and then in any case.
        ``let_go`` is called once it is true. The condition of what is returned may be replaced.
        """
        if not self._in_flight:
            self._since_progress = time.monotonic()
        in_flight = _InFlight(is_done, stall, let_go)
        self._in_flight.append(in_flight)
        return in_flight

    def watch_replays(self, replays: ReplayedMessages) -> None:
        """Time out if messages that a graph replays do not complete, from now on."""
        self._replays = replays

    def close(self) -> None:
        """End the thread; if it is aborting NCCL, wait for a limited time only."""
        self._is_closed.set()
        self._thread.join(limit_now(_ENDING * self._timeout_s))

    def _run(self) -> None:
        try:
            self._gpu.enter_thread()
            self._poll()
        except Exception as error:  # noqa: BLE001  without this thread, waits would have no limit
            seen = f"{type(error).__name__}: {error}"
            self._give_up(Stall("watching the network", (), "its state", seen))

    def _poll(self) -> None:
        grace = Grace(self._watchdog)
        while not self._is_closed.wait(_POLL_INTERVAL_S):
            # Before looking at what is done: a rank may have left because its messages are.
            is_failed = (grace.is_over and self._watchdog.has_failed_rank) or bool(self._nccl.failure)
            while self._in_flight and self._in_flight[0].is_done():
                if let_go := self._in_flight.popleft().let_go:
                    let_go()
                self._since_progress = time.monotonic()
            if stall := self._hopeless(is_failed):
                self._give_up(stall)
                return

    def _hopeless(self, is_failed: bool) -> Stall | None:  # noqa: FBT001  of the network
        """Return a wait that is too long, or that will not end."""
        launched, replays = bool(self._in_flight), self._replays
        if launched and (is_failed or time.monotonic() - self._since_progress > self._timeout_s):
            return self._in_flight[0].stall
        if replays and (replays.wait_s() > self._timeout_s or (is_failed and replays.are_waiting)):
            return replays.stall()
        return None

    def _give_up(self, stall: Stall) -> None:
        self.stall = stall
        self._in_flight.clear()
        self._on_stall()
        self._nccl.abort()


class ReplayedMessages:
    """Words that the device writes before and after messages of a graph, and one thread of the host reads.

    The device sets the first word before the messages, and clears both after them. The reader sets the second one, so
    it sees whether any messages have completed since it last looked.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, device = gpu, gpu.device
        self._memory = pinned(torch.zeros(2, dtype=torch.int32, device="cpu"), device)
        self._waiting, self._done = (torch.full((n,), 2 - n, dtype=torch.int32, device=device) for n in (1, 2))
        self._words = (ctypes.c_int32 * 2).from_address(self._memory.data_ptr())
        self._peers: set[int] = set()
        self._since = 0.0

    @property
    def are_captured(self) -> bool:
        """True once messages were captured: a graph may replay them at any time."""
        return bool(self._peers)

    def begin(self, stream: torch.cuda.Stream, peers: tuple[int, ...]) -> None:
        """Capture the beginning of messages with some ranks."""
        self._peers.update(peers)
        with self._gpu.on(stream):
            self._memory[:1].copy_(self._waiting, non_blocking=True)

    def end(self, stream: torch.cuda.Stream) -> None:
        """Capture the end of messages."""
        with self._gpu.on(stream):
            self._memory.copy_(self._done, non_blocking=True)

    @property
    def are_waiting(self) -> bool:
        """True while the device waits for messages of a graph."""
        return bool(self._words[_IS_WAITING])

    def wait_s(self) -> float:
        """Return how long none of them have completed although the device waits for some; for one thread."""
        now = time.monotonic()
        if not (self._words[_IS_WAITING] and self._words[_IS_OLD]):
            self._since, self._words[_IS_OLD] = now, 1
        return now - self._since

    def stall(self) -> Stall:
        """Return the wait for all ranks that messages of graphs come from."""
        return Stall("the network", tuple(sorted(self._peers)), "messages of a replayed graph", "not all of them")
