"""The CPU engine on hosts with several NICs: an idle neighbour's NIC is used, rails fail under its calls."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest
from forked_ranks import ForkedRank

from fusco.testbed import Testbed
from fusco.testbed.testbed import rank_environment

RATE, NUM_TOKENS = 400_000_000, 1024


class Job:
    """Two ranks on each of two hosts, which see all rails of their host."""

    def __init__(self, bed: Testbed, *arguments: str) -> None:
        self.bed, self.count = bed, 0
        self.processes = []
        for rank in range(4):
            host, local_rank = divmod(rank, 2)
            own = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": "2"}
            self.processes.append(
                ForkedRank(bed.namespaces(host), {**rank_environment(bed, host, 0), **own}, "shuffles", arguments)
            )

    def go_on(self, iterations: int) -> list[int]:
        """Wait until host 0 has done more iterations, each of which compares its rows; return the bytes of a rank."""
        for _ in range(iterations):
            self.count += 1
            lines = [process.stdout.readline() for process in self.processes[:2]]
            assert all(line.startswith(f"iteration {self.count}: ") for line in lines), lines
        return [int(line.split()[2]) for line in lines]

    def sent(self, host: int) -> list[int]:
        return [self.bed.counters(host, rail).sent_bytes for rail in range(self.bed.layout.num_rails)]


@contextmanager
def job_on(num_rails: int, *arguments: str):
    with Testbed(2, num_rails, RATE) as bed:
        yield Job(bed, *arguments)


@pytest.fixture(scope="module")
def job():
    # Even ranks forward for even ranks, so odd ones send no row to another host.
    with job_on(2, "static", str(NUM_TOKENS), "0") as running:
        yield running


def test_a_rank_with_two_rails_takes_twice_the_share_of_one_with_one():
    with job_on(3, "lanes", str(NUM_TOKENS), str(NUM_TOKENS)) as job:
        job.go_on(1)
        before = job.sent(0)
        of_rank = job.go_on(6)  # of 3, shares vary by up to 15 % on two cores
        of_rail = [after - start for start, after in zip(before, job.sent(0), strict=True)]
    row_bytes = sum(of_rank) // (2 * NUM_TOKENS)
    assert sum(of_rank) == 2 * NUM_TOKENS * row_bytes  # every token crosses once
    assert of_rank[0] == pytest.approx(2 * of_rank[1], rel=0.03)
    assert max(of_rail) < 1.15 * sum(of_rail) / 3


def test_an_idle_ranks_nic_is_borrowed(job):
    job.go_on(2)
    before = job.sent(0)
    job.go_on(3)
    own, borrowed = (after - start for start, after in zip(before, job.sent(0), strict=True))
    assert borrowed > 0.3 * (own + borrowed)  # rank 1, whose rail it is, sends no rows


@pytest.mark.parametrize("rail", [1, 0])
def test_calls_go_on_over_the_other_rail_until_it_is_back(job, rail):
    job.bed.set_link(1, rail, up=False)
    job.go_on(4)
    before = job.sent(1)[rail]
    job.go_on(2)
    assert job.sent(1)[rail] - before < 100_000
    job.bed.set_link(1, rail, up=True)
    time.sleep(1.0)
    job.go_on(8)
    before = job.sent(1)[rail]
    job.go_on(2)
    assert job.sent(1)[rail] - before > 1_000_000


def test_without_any_rail_the_error_names_peer_and_rails(job):
    for rail in range(2):
        job.bed.set_link(1, rail, up=False)
    begin = time.monotonic()
    failure = job.processes[0].stdout.readlines()[-1]
    assert time.monotonic() - begin < 15.0
    assert failure.startswith("rank 0 failed: ")
    assert "waiting for rank(s) " in failure
    for rail in range(2):
        assert f"rail {rail} (rail{rail}, 10.200.{rail}.1): " in failure
