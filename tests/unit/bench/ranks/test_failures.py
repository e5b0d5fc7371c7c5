"""Failures of ranks as text: each once, with tracebacks only if they are needed."""

import pytest
from torch.distributed import DistBackendError

from fusco.bench.ranks.failures import RankFailedError, RankFailure
from fusco.cli import main
from fusco.core.errors import PeerFailureError, RejectedInputError, Stall


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


def test_a_failure_of_several_ranks_is_reported_once():
    error = RankFailedError({rank: raised(MISTAKE) for rank in (3, 0, 1)})
    assert error.summary == "ranks 0-1, 3: ValueError: ring_depth is 1, but must be 2 at least"
    assert str(error).startswith(error.summary + "\nrank 3:\nTraceback")
    assert not error.unexpected


def test_a_failed_allocation_is_one_sentence():
    error = RankFailedError({0: raised(ALLOCATION)})
    assert error.summary == "rank 0: RuntimeError: not enough memory for 1,000,000 bytes"
    assert not error.unexpected


def test_an_unexpected_error_has_its_traceback():
    error = RankFailedError({0: raised(MISTAKE), 1: raised(KeyError("gone"))}, "rank(s) [2] gave no result")
    assert error.summary.splitlines() == [
        "rank 0: ValueError: ring_depth is 1, but must be 2 at least",
        "rank 1: KeyError: 'gone'",
        "rank(s) [2] gave no result",
    ]
    assert error.unexpected.startswith("rank 1:\nTraceback")
    assert "ring_depth" not in error.unexpected


def gave_up(rank, peer, reason):
    stall = Stall("rows", (peer,), f"{rank + 3} slices", "4")
    return PeerFailureError(
        rank=rank, peers=(peer,), operation="dispatch #3", stall=stall, reason=reason, has_left=True
    )


def test_one_message_names_the_root_cause_of_all_failures():
    died = RankFailure("its process died with exit code -9")
    error = RankFailedError(
        {2: died, **{rank: raised(gave_up(rank, 2, "rank 2 (pid 47) is dead")) for rank in (0, 1, 3)}}
    )
    assert error.summary.splitlines() == [
        "rank 2: its process died with exit code -9",
        "ranks 0-1, 3: gave up because of that",
    ]
    assert str(error).count("Traceback") == 1, "that of a rank that gave up, as the dead one has none"
    assert "dispatch #3" in str(error)


LOST = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:6"
)
OF_NCCL = DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:94, remote process exited or there was a network error")


def test_the_culprit_comes_first_without_tracebacks_of_ranks_whose_connections_it_took():
    died = RankFailure("its process died with exit code -9 (SIGKILL)", has_died=True)
    failures = {0: raised(LOST), 1: raised(OF_NCCL), 2: raised(gave_up(2, 3, "rank 3 is dead")), 3: died}
    error = RankFailedError(failures, "rank(s) [4] gave no result within 30 s after another failed")
    assert error.summary.splitlines() == [
        "rank 3: its process died with exit code -9 (SIGKILL)",
        "ranks 0-2: gave up because of that",
        "rank(s) [4] gave no result within 30 s after another failed",
    ]
    assert not error.unexpected
    first, *_ = RankFailedError({0: raised(KeyError("gone")), 3: died}).summary.splitlines()
    assert first == "rank 3: its process died with exit code -9 (SIGKILL)"


def test_lost_connections_alone_are_told_once_with_a_traceback():
    error = RankFailedError({1: raised(LOST), 2: raised(LOST)})
    first, others = error.summary.splitlines()
    assert first.startswith("rank 1: RuntimeError: [/pytorch/third_party/gloo")
    assert others == "rank 2: gave up for the same cause as rank 1"
    assert error.unexpected.startswith("rank 1:\nTraceback")
    assert error.unexpected.count("Traceback") == 1


def test_the_text_has_a_traceback_of_each_root_cause():
    error = RankFailedError({0: raised(gave_up(0, 1, "rank 1 left")), 1: raised(MISTAKE), 2: raised(MISTAKE)})
    assert str(error).splitlines()[2:4] == ["rank 1:", "Traceback (most recent call last):"]
    assert str(error).count("Traceback") == 1


def test_ranks_that_gave_up_are_summarised():
    rejected = RejectedInputError("rank 1 rejected its input: ValueError: ring_depth is 1")
    error = RankFailedError({0: raised(rejected), 1: raised(MISTAKE), 2: raised(rejected)})
    assert error.summary.splitlines() == [
        "rank 1: ValueError: ring_depth is 1, but must be 2 at least",
        "ranks 0, 2: gave up because of that",
    ]


def test_of_ranks_that_gave_up_for_the_same_cause_one_is_quoted():
    error = RankFailedError({rank: raised(gave_up(rank, 3, "rank 3 does not answer")) for rank in range(3)})
    first, others = error.summary.splitlines()
    assert first.startswith("rank 0: PeerFailureError: rank 0 gave up in dispatch #3")
    assert "expected 3 slices" in first
    assert others == "ranks 1-2: gave up for the same cause as rank 0"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RankFailedError({0: raised(MISTAKE)}), 1, "failed: rank 0: ValueError: ring_depth"),
        (RankFailedError({0: raised(KeyError("gone"))}), 1, "traceback: rank 0:"),
        (MISTAKE, 2, "error: ring_depth is 1"),
        (OverflowError("int too large"), 2, "error: int too large"),
        (MemoryError(), 1, "failed: there is not enough memory"),
        (ALLOCATION, 1, "failed: not enough memory for 1,000,000 bytes"),
    ],
)
def test_the_command_line_turns_errors_into_sentences(error, code, message, monkeypatch, capsys):
    def fail(**_):
        raise error

    monkeypatch.setattr(main, "app", fail)
    with pytest.raises(SystemExit) as exit_info:
        main.run()
    assert exit_info.value.code == code
    assert message in capsys.readouterr().err
