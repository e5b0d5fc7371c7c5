"""What failed on ranks, as it is told: once, and with tracebacks only where they are of use."""

import pytest

from fusco.cli import main
from fusco.ranks.failures import RankFailedError, RankFailure


def raised(error):
    def fail():
        raise error

    try:
        fail()
    except Exception as caught:  # noqa: BLE001  any
        return RankFailure.of(caught)


MISTAKE = ValueError("ring_depth is 1, but must be 2 at least")
ALLOCATION = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "1000000 bytes. Error code 12 (Cannot allocate memory)"
)


def test_what_all_ranks_say_is_said_once():
    error = RankFailedError({rank: raised(MISTAKE) for rank in (3, 0, 1)})
    assert error.summary == "ranks 0-1, 3: ValueError: ring_depth is 1, but must be 2 at least"
    assert str(error).startswith(error.summary + "\nrank 3:\nTraceback")
    assert not error.unexpected


def test_memory_that_cannot_be_had_is_a_sentence():
    error = RankFailedError({0: raised(ALLOCATION)})
    assert error.summary == "rank 0: RuntimeError: there is no memory for 1,000,000 bytes"
    assert not error.unexpected


def test_an_error_that_nobody_expects_has_its_traceback():
    error = RankFailedError({0: raised(MISTAKE), 1: raised(KeyError("gone"))}, "rank(s) [2] gave no result")
    assert error.summary.splitlines() == [
        "rank 0: ValueError: ring_depth is 1, but must be 2 at least",
        "rank 1: KeyError: 'gone'",
        "rank(s) [2] gave no result",
    ]
    assert error.unexpected.startswith("rank 1:\nTraceback")
    assert "ring_depth" not in error.unexpected


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (RankFailedError({0: raised(MISTAKE)}), 1, "failed: rank 0: ValueError: ring_depth"),
        (RankFailedError({0: raised(KeyError("gone"))}), 1, "traceback: rank 0:"),
        (MISTAKE, 2, "error: ring_depth is 1"),
        (OverflowError("int too large"), 2, "error: int too large"),
        (MemoryError(), 1, "failed: there is not enough memory"),
        (ALLOCATION, 1, "failed: there is no memory for 1,000,000 bytes"),
    ],
)
def test_the_command_line_turns_errors_into_sentences(error, code, told, monkeypatch, capsys):
    def fail():
        raise error

    monkeypatch.setattr(main, "app", fail)
    with pytest.raises(SystemExit) as exit_info:
        main.run()
    assert exit_info.value.code == code
    assert told in capsys.readouterr().err
