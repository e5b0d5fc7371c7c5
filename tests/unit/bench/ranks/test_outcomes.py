"""Ranks of a launched job exchange their outcomes: one of them reports all failures."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from fusco.bench.ranks import torchrun
from fusco.bench.ranks.failures import RankFailedError, RankFailure, ReportedElsewhereError
from fusco.bench.ranks.torchrun import Outcomes

FAILURE = RankFailure("ValueError: no room for 3")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in (("_GRACE_S", 0.3), ("_REPORT_S", 0.02), ("_POLL_S", 0.01)):
        monkeypatch.setattr(torchrun, name, seconds)


def settle(*failures, silent=()):
    """Return each rank's error, or ``None``."""
    store = HashStore()

    def of_rank(rank):
        try:
            Outcomes(store, rank, len(failures)).settle(failures[rank])
        except (RankFailedError, ReportedElsewhereError) as error:
            return error
        return None

    ranks = [rank for rank in range(len(failures)) if rank not in silent]
    with ThreadPoolExecutor(len(failures)) as pool:
        return list(pool.map(of_rank, ranks))


def test_nothing_failed():
    assert settle(None, None, None) == [None] * 3


@pytest.mark.parametrize("failures", [(FAILURE, FAILURE, FAILURE), (None, FAILURE, FAILURE), (None, None, FAILURE)])
def test_rank_0_reports_and_the_others_know_it(failures):
    first, *others = settle(*failures)
    assert isinstance(first, RankFailedError)
    assert first.summary.endswith(": ValueError: no room for 3")
    assert [type(error) for error in others] == [ReportedElsewhereError] * 2


def test_a_rank_that_goes_on_is_not_waited_for():
    first, other = settle(None, FAILURE, None, silent=[2])
    assert "rank 1: ValueError: no room for 3" in first.summary
    assert "rank(s) [2] gave no result within 0.3 s after another failed" in first.summary
    assert isinstance(other, ReportedElsewhereError)


def test_without_rank_0_ranks_raise_their_errors(monkeypatch):
    monkeypatch.setattr(torchrun, "_LIMIT_S", 0.1)
    failed, fine = settle(None, FAILURE, None, silent=[0])
    assert failed is None, "it raises its own error"
    assert "rank 0 gave no result within 0.1 s" in str(fine)
