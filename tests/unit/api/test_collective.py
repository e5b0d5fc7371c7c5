"""Steps of every collective: errors of each step, and how far a rank with rejected input takes part."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fusco.api.collective import run_collective
from fusco.control.fingerprint import CollectiveFingerprint
from fusco.core.access import Access
from fusco.core.errors import SharedMemoryError
from fusco.core.profile import Call, CallProfile
from fusco.engine.base import Pending, Request


@dataclass
class Valid(Request):
    fields = {"num_topk": 8}  # noqa: RUF012


class Session:
    """A session of two ranks with equal fields; the other one sends counts larger by one."""

    has_published = False

    def __init__(self) -> None:
        self.log: list[object] = []
        self.profile = CallProfile()
        self.access = Access("a communicator")

    def begin(self, operation):
        self.log.append(f"begin {operation}")
        return Call(7, self.profile)

    def leave(self, operation, error=None):
        if error is None:
            self.log.append("end")

    def agree(self, fingerprint, counts=(), handle=0, attachments=None):
        self.log.append(fingerprint)
        return [tuple(counts), tuple(count + 1 for count in counts)]


class Engine:
    def __init__(self, earlier: Exception | None = None) -> None:
        self._earlier = earlier

    def pending_error(self) -> Exception | None:
        return self._earlier


def raising(error: Exception):
    def function(*_):
        raise error

    return function


def play(session, validate=Valid, prepare=None, engine=None):
    return run_collective(session, engine or Engine(), "combine", validate, prepare or prepared)


def prepared(request: Valid, call: Call) -> Pending:
    return Pending((call.sequence_number,), lambda counts: (request, counts))


@pytest.mark.parametrize(
    ("how", "error", "reason"),
    [
        ("validate", ValueError("no rows"), "no rows"),
        ("validate", TypeError("no tensor"), "no tensor"),
        ("validate", RuntimeError("no storage to look at\nframe #0: at()"), "no storage to look at"),
        ("validate", LookupError("a mapping without its key"), "a mapping without its key"),
        ("validate", MemoryError(), "MemoryError"),
        ("prepare", ValueError("no expert"), "no expert"),
        ("prepare", SharedMemoryError("no room"), "no room"),
        ("earlier", ValueError("an earlier dispatch"), "an earlier dispatch"),
    ],
    ids=str,
)
def test_rejected_input_is_reported_to_all_ranks_and_not_run(how, error, reason):
    session = Session()
    arguments = {
        "validate": {"validate": raising(error)},
        "prepare": {"prepare": raising(error)},
        "earlier": {"engine": Engine(error), "prepare": raising(AssertionError("prepared all the same"))},
    }
    with pytest.raises(type(error)) as caught:
        play(session, **arguments[how])
    assert caught.value is error
    assert session.log == ["begin combine", CollectiveFingerprint("combine", {}, reason), "end"]


def test_an_earlier_error_comes_before_that_of_bad_input():
    earlier = ValueError("an earlier dispatch")
    with pytest.raises(ValueError, match="an earlier dispatch"):
        play(Session(), validate=raising(ValueError("no rows")), engine=Engine(earlier))


@pytest.mark.parametrize("how", ["prepare", "run"])
def test_any_other_error_ends_the_session(how):
    """It leaves the context of the collective, which notifies all other ranks."""
    session, fail = Session(), raising(RuntimeError("CUDA error"))
    with pytest.raises(RuntimeError, match="CUDA error"):
        play(session, prepare=fail if how == "prepare" else lambda *_: Pending((), fail))
    assert "end" not in session.log


def test_an_interruption_right_after_the_beginning_ends_the_session(monkeypatch):
    """As Ctrl-C may come between any two steps."""
    session, left = Session(), []
    monkeypatch.setattr(session, "begin", raising(KeyboardInterrupt()))
    monkeypatch.setattr(session, "leave", lambda *of: left.append(of))
    with pytest.raises(KeyboardInterrupt) as caught:
        play(session)
    assert left == [("combine", caught.value)]
