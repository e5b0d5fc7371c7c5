"""The NCCL watchdog: nothing waits for ever, and nothing that moves is given up."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from unittest import mock

import pytest
from network_mocks import LIMIT_S, NO_LIMIT_S, SLACK_S, Gpu, Nccl, Watchdog

from fusco.core.errors import Stall, TransportError
from fusco.cuda.between_nodes.network import NcclWatchdog


class Scene:
    """An NCCL watchdog, and its calls."""

    def __init__(self, timeout_s: float, gpu: Gpu | None = None) -> None:
        self.nccl, self.watchdog = Nccl(), Watchdog()
        self.calls: list[tuple[Stall | None, int]] = []  # the stall and the number of aborts at each call of on_stall
        self._is_made = threading.Event()
        self.nccl_watchdog = NcclWatchdog(self.nccl, self.watchdog, timeout_s, gpu or Gpu(), self._note_stall)
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


def test_a_rank_that_leaves_as_the_last_message_is_done_is_nothing_to_the_watchdog():
    has_left, has_looked = threading.Event(), threading.Event()

    class Leaving(Watchdog):
        """Its rank leaves with its last message done, just when the watchdog looks for ranks that are gone."""

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


def test_a_rank_that_is_gone_is_nothing_to_the_watchdog_with_nothing_under_way():
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
    deeds, gpu = [], Gpu()

    def enter():
        time.sleep(0.1)
        deeds.append(threading.current_thread())

    gpu.enter_thread = enter
    with closing(Scene(NO_LIMIT_S, gpu)) as scene:
        scene.nccl_watchdog.watch(lambda: not deeds.append("a look"), stall_of("slice 0"))
        time.sleep(0.3)
    assert deeds == [scene.nccl_watchdog._thread, "a look"]


def test_a_guard_that_cannot_enter_its_device_gives_up():
    gpu = Gpu()
    gpu.enter_thread = mock.Mock(side_effect=TransportError("no"))
    with closing(Scene(NO_LIMIT_S, gpu)) as scene:
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
