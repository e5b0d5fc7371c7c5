"""What is under way between nodes is watched over: nothing waits for ever, and nothing that moves is given up."""

from __future__ import annotations

import threading
import time
from contextlib import closing, contextmanager
from unittest import mock

import pytest
import torch

from fusco.core.errors import Stall, TransportError
from fusco.cuda.nccl import Message
from fusco.cuda.network import NcclWatchdog, Network
from fusco.cuda.replayed_messages import ReplayedMessages

DEVICE = torch.device("cuda", 3)
LIMIT_S, NO_LIMIT_S = 0.3, 600.0
SLACK_S = 5.0  # more than a loaded machine takes for what is to come at once


class Nccl:
    """Mock of ``NcclTransport``; with ``hangs``, a launch blocks until it is aborted."""

    def __init__(self, *_, channels_per_peer=None) -> None:
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


class Scene:
    """An NCCL watchdog, and its calls."""

    def __init__(self, timeout_s: float) -> None:
        self.nccl, self.watchdog = Nccl(), Watchdog()
        self.calls: list[tuple[Stall | None, int]] = []  # the stall and the number of aborts at each call of on_stall
        self._is_made = threading.Event()
        self.nccl_watchdog = NcclWatchdog(self.nccl, self.watchdog, timeout_s, DEVICE, self._note_stall)
        self._is_made.set()
        self.began = time.monotonic()
        self.close = self.nccl_watchdog.close

    def _note_stall(self) -> None:
        self._is_made.wait(SLACK_S)
        self.calls.append((self.nccl_watchdog.stall, len(self.nccl.aborts)))

    def watch(self, what: str, done_after_s: float) -> None:
        self.nccl_watchdog.watch(lambda: time.monotonic() - self.began >= done_after_s, stall_of(what))

    def gave_up_on(self, what: str) -> float:
        """Return the time until the watchdog gave up; assert that it reported this stall once, then aborted NCCL."""
        assert self.nccl.has_aborted.wait(SLACK_S)
        self.nccl_watchdog.close()  # when it has done all that it does
        assert self.nccl_watchdog.stall == stall_of(what)
        assert self.calls == [(stall_of(what), 0)]
        assert len(self.nccl.aborts) == 1
        return self.nccl.aborts[0] - self.began

    @property
    def is_untouched(self) -> bool:
        return (self.nccl_watchdog.stall, self.calls, self.nccl.aborts) == (None, [], [])


def stall_of(what: str) -> Stall:
    return Stall("the network", (1,), what, "nothing")


def never() -> bool:
    return False


def test_what_gets_done_in_time_is_left_alone_however_long_all_of_it_takes():
    with closing(Scene(LIMIT_S)) as scene:
        for number in range(8):
            scene.watch(f"slice {number}", done_after_s=number * LIMIT_S / 3)
        time.sleep(3 * LIMIT_S)
        assert scene.is_untouched
        assert scene.nccl_watchdog._thread.is_alive()


def test_a_guard_gives_up_when_nothing_has_been_done_for_the_limit():
    with closing(Scene(LIMIT_S)) as scene:
        scene.watch("slice 0", NO_LIMIT_S)
        assert LIMIT_S <= scene.gave_up_on("slice 0") < LIMIT_S + SLACK_S


def test_the_limit_begins_anew_with_all_that_gets_done():
    with closing(Scene(LIMIT_S)) as scene:
        scene.watch("slice 0", done_after_s=LIMIT_S / 2)
        scene.watch("slice 1", NO_LIMIT_S)
        scene.watch("slice 2", done_after_s=0.0)
        assert scene.gave_up_on("slice 1") >= 1.5 * LIMIT_S


def test_the_limit_begins_with_what_is_watched_over_after_a_pause():
    with closing(Scene(LIMIT_S)) as scene:
        scene.watch("slice 0", done_after_s=0.0)
        time.sleep(1.5 * LIMIT_S)
        scene.watch("slice 1", done_after_s=2 * LIMIT_S)
        time.sleep(LIMIT_S)
        assert scene.is_untouched


@pytest.mark.parametrize("fault", ["a rank is gone", "the network failed"])
def test_a_guard_gives_up_at_once_when_it_is_told_why(fault):
    with closing(Scene(NO_LIMIT_S)) as scene:
        scene.watch("slice 0", NO_LIMIT_S)
        time.sleep(0.1)
        assert scene.is_untouched
        if fault == "a rank is gone":
            scene.watchdog.has_failed_rank = True
        else:
            scene.nccl.failure = "NCCL: socket closed"
        assert scene.gave_up_on("slice 0") < SLACK_S


def test_a_rank_that_leaves_as_the_last_message_is_done_is_nothing_to_a_guard():
    has_left, has_looked = threading.Event(), threading.Event()

    class Leaving(Watchdog):
        """Its rank leaves with its last message done, just when the guard looks for ranks that are gone."""

        @property
        def has_failed_rank(self) -> bool:
            if has_left.is_set():
                has_looked.set()
            has_left.set()
            return True

    with mock.patch(f"{__name__}.Watchdog", Leaving), closing(Scene(NO_LIMIT_S)) as scene:
        scene.nccl_watchdog.watch(has_left.is_set, stall_of("slice 0"))
        assert has_looked.wait(SLACK_S)
        assert scene.is_untouched


def test_what_comes_within_a_second_after_a_rank_has_left_is_not_given_up():
    with closing(Scene(NO_LIMIT_S)) as scene:
        scene.watch("slice 0", done_after_s=0.5)
        scene.watch("slice 1", NO_LIMIT_S)
        scene.watchdog.has_departed_rank = True  # it says so, and then closes its connections
        scene.watchdog.has_failed_rank = True
        assert 1.0 <= scene.gave_up_on("slice 1") < 1.0 + SLACK_S


def test_a_rank_that_is_gone_is_nothing_to_a_guard_with_nothing_under_way():
    with closing(Scene(NO_LIMIT_S)) as scene:
        scene.watchdog.has_failed_rank = True
        scene.watch("slice 0", done_after_s=0.0)
        time.sleep(0.1)
        assert scene.is_untouched


@pytest.mark.parametrize("num_under_way", [0, 1, 3])
def test_closing_ends_the_thread_and_nothing_else(num_under_way):
    scene = Scene(NO_LIMIT_S)
    for number in range(num_under_way):
        scene.nccl_watchdog.watch(never, stall_of(f"slice {number}"))
    scene.close()
    assert not scene.nccl_watchdog._thread.is_alive()
    assert scene.is_untouched


def test_an_idle_guard_takes_no_time():
    with closing(Scene(NO_LIMIT_S)) as scene:
        scene.watch("slice 0", done_after_s=0.0)
        time.sleep(0.05)
        began = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - began < 0.1
        assert scene.nccl_watchdog._thread.is_alive()


def test_a_guard_that_cannot_look_gives_up_and_says_why():
    def fail():
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    with closing(Scene(NO_LIMIT_S)) as scene:
        scene.nccl_watchdog.watch(fail, stall_of("slice 0"))
        assert scene.nccl.has_aborted.wait(SLACK_S)
        scene.nccl_watchdog.close()
        assert scene.nccl_watchdog.stall.phase == "watching the network"
        assert (
            scene.nccl_watchdog.stall.seen
            == "RuntimeError: CUDA error: operation not permitted when stream is capturing"
        )
        assert scene.calls == [(scene.nccl_watchdog.stall, 0)]


def test_a_guard_enters_its_device_before_it_looks():
    deeds = []

    def enter(device):
        time.sleep(0.1)
        deeds.append((device, threading.current_thread()))

    with mock.patch("fusco.cuda.network.enter_device", enter), closing(Scene(NO_LIMIT_S)) as scene:
        scene.nccl_watchdog.watch(lambda: not deeds.append("a look"), stall_of("slice 0"))
        time.sleep(0.3)
    assert deeds == [(DEVICE, scene.nccl_watchdog._thread), "a look"]


def test_a_guard_that_cannot_enter_its_device_gives_up():
    with (
        mock.patch("fusco.cuda.network.enter_device", side_effect=TransportError("no")),
        closing(Scene(NO_LIMIT_S)) as scene,
    ):
        assert scene.nccl.has_aborted.wait(SLACK_S)
        assert scene.nccl_watchdog.stall.seen == "TransportError: no"


def test_a_guard_that_is_held_up_is_not_waited_for():
    scene = Scene(LIMIT_S)
    may_end = threading.Event()
    with mock.patch.object(scene.nccl, "abort", may_end.wait):
        scene.watch("slice 0", NO_LIMIT_S)
        while scene.nccl_watchdog.stall is None:
            time.sleep(0.01)
        began = time.monotonic()
        scene.close()
        assert time.monotonic() - began < LIMIT_S + SLACK_S
        assert scene.nccl_watchdog._thread.is_alive()
        may_end.set()


def test_a_guard_looks_now_and_then():
    looks = []
    with closing(Scene(NO_LIMIT_S)) as scene:
        scene.nccl_watchdog.watch(lambda: bool(looks.append(time.monotonic())), stall_of("slice 0"))
        time.sleep(0.4)
    took_s = time.monotonic() - scene.began
    assert 2 <= len(looks) <= took_s / 0.02 + 2


class Event:
    """Replaces ``torch.cuda.Event``."""

    made: list[Event]

    def __init__(self) -> None:
        self.stream, self.is_done = None, False
        Event.made.append(self)

    def record(self, stream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.is_done


class OnHost(ReplayedMessages):
    """Replayed messages of which a test tells."""

    def __init__(self, device) -> None:
        with mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor):
            super().__init__(torch.device("cpu"))
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
    Event.made = []
    with (
        mock.patch("fusco.cuda.network.NcclTransport", Nccl),
        mock.patch("fusco.cuda.network.ReplayedMessages", OnHost),
        mock.patch.object(torch.cuda, "Event", Event),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
    ):
        stream = mock.Mock(cuda_stream=77, device=DEVICE)
        network = Network(mock.Mock(), Watchdog(), stream, num_remote_nodes, LIMIT_S, on_stall=mock.Mock())
        yield network
        network.close()


@pytest.fixture
def network():
    with network_to(1) as network:
        yield network


@pytest.mark.parametrize(("num_remote_nodes", "channels"), [(1, 4), (2, None), (3, None), (7, None)])
def test_one_other_node_gets_more_channels_than_nccl_would_take(num_remote_nodes, channels):
    with network_to(num_remote_nodes) as network:
        assert network._nccl.channels_per_peer == channels


SENDS, RECEIVES = [Message(3, 100, 10)], [Message(2, 200, 1500), Message(3, 300, 500)]


def test_messages_are_watched_over_until_the_event_behind_them(network):
    done = network.exchange(SENDS, RECEIVES, "slice 4")
    assert network._nccl.launches == [(SENDS, RECEIVES, 77)]
    assert Event.made == [done]
    assert done.stream is network.stream
    assert network._nccl.has_aborted.wait(SLACK_S)
    assert network.nccl_watchdog.stall == Stall("the network", (2, 3), "slice 4", "not all of 2,000 bytes")


def test_messages_that_have_travelled_are_forgotten(network):
    network.exchange(SENDS, RECEIVES, "slice 4").is_done = True
    time.sleep(1.5 * LIMIT_S)
    assert network.nccl_watchdog.stall is None
    assert not network._nccl.aborts


def test_a_launch_that_hangs_is_ended_within_the_limit(network):
    network._nccl.hangs = True
    began = time.monotonic()
    network.exchange(SENDS, [], "routing")
    assert LIMIT_S <= time.monotonic() - began < LIMIT_S + SLACK_S
    assert network.nccl_watchdog.stall == Stall("the network", (3,), "routing", "not all of 0 bytes")


def test_closing_a_network_ends_what_is_under_way(network):
    network.exchange(SENDS, RECEIVES, "slice 4")
    network.close()
    assert not network.nccl_watchdog._thread.is_alive()
    assert network.nccl_watchdog.stall is None
    assert len(network._nccl.aborts) == 1


def test_a_network_that_finishes_ends_nothing(network):
    network.exchange(SENDS, RECEIVES, "slice 4").is_done = True
    network.finish()
    assert not network.nccl_watchdog._thread.is_alive()
    assert (len(network._nccl.finishes), network._nccl.aborts) == (1, [])


@pytest.mark.parametrize("how", ["finish", "close"])
def test_a_network_that_does_not_end_is_left_to_a_thread(network, how):
    may_end, has_ended = threading.Event(), threading.Event()

    def hang():
        may_end.wait()
        has_ended.set()

    network._nccl.finish = network._nccl.abort = hang
    began = time.monotonic()
    with pytest.warns(UserWarning, match=r"NCCL has not freed its resources on cuda:3 within 0\.1 s"):
        getattr(network, how)()
    assert time.monotonic() - began < LIMIT_S + SLACK_S
    may_end.set()
    assert has_ended.wait(SLACK_S)
    network._nccl.abort = lambda: None


@pytest.fixture
def captured(network):
    """A network whose messages were captured in a graph."""
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        network.exchange(SENDS, RECEIVES, "slice 0")
    return network


def test_captured_messages_are_no_launched_ones(captured):
    assert captured._nccl.launches == [(SENDS, RECEIVES, 77)]
    assert captured._replays.calls == [("begin", captured.stream), ("end", captured.stream)]
    time.sleep(1.5 * LIMIT_S)  # the event of the capture must not be queried, and would never be done
    assert captured.nccl_watchdog.stall is None


def test_replays_that_complete_are_left_alone_however_many_there_are(captured):
    for _ in range(30):
        captured._replays.replay(is_done=True)
        captured._replays.replay(is_done=False)  # each time that the watchdog looks, the device waits
        time.sleep(LIMIT_S / 10)
    assert captured.nccl_watchdog.stall is None


def test_a_replay_that_does_not_complete_is_ended_within_the_limit(captured):
    captured._replays.replay(is_done=True)
    time.sleep(0.1)
    captured._replays.replay(is_done=False)
    began = time.monotonic()
    assert captured._nccl.has_aborted.wait(SLACK_S)
    assert LIMIT_S - 0.05 <= time.monotonic() - began < LIMIT_S + SLACK_S
    assert captured.nccl_watchdog.stall == Stall(
        "the network", (2, 3), "messages of a replayed graph", "not all of them"
    )


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_rank_that_is_gone_ends_a_replay_that_waits(captured, is_waiting):
    captured._replays.replay(is_done=not is_waiting)
    with mock.patch.object(captured.nccl_watchdog, "_timeout_s", NO_LIMIT_S):
        captured._watchdog.has_failed_rank = True
        assert captured._nccl.has_aborted.wait(SLACK_S if is_waiting else 0.2) == is_waiting


def test_a_network_with_graphs_does_not_wait_for_the_end_of_nccl(captured):
    """Until they are deleted, NCCL keeps what they use."""
    may_end = threading.Event()
    captured._nccl.finish = may_end.wait
    began = time.monotonic()
    captured.finish()  # and warns of nothing
    assert time.monotonic() - began < SLACK_S
    may_end.set()
