"""Moves of experts take the time of the busiest NIC, send no byte twice, and do not delay a dispatch between steps."""

from __future__ import annotations

import json
import statistics

import pytest
from forked_ranks import fork_ranks

from fusco.testbed import Testbed

RATE, EXPERT_BYTES, SHARE, LIMIT_S = 200_000_000, 2_000_000, 0.04, 60.0


@pytest.fixture(scope="module", params=[(2, 4), (4, 2)], ids=["2x4", "4x2"])
def measured(request, tmp_path_factory):
    """Records of moves and of iterations, and the bytes that all NICs sent for the moves."""
    num_hosts, ranks_per_host = request.param
    may_go_on = tmp_path_factory.mktemp("moves") / "go_on"
    with Testbed(num_hosts, ranks_per_host, RATE, ranks_per_host=ranks_per_host) as bed:
        ranks = fork_ranks(bed, "moves", str(EXPERT_BYTES), str(RATE), str(SHARE), str(may_go_on))
        moves = json.loads(ranks[0].stdout.readline())
        sent = sum(bed.counters(host, rail).sent_bytes for host in range(num_hosts) for rail in range(ranks_per_host))
        may_go_on.touch()
        iterations = json.loads(ranks[0].stdout.read())
        assert [rank.ended(LIMIT_S) for rank in ranks] == [0] * len(ranks)
    return moves, iterations, sent


def test_a_move_takes_the_time_of_the_busiest_nic(measured):
    """1.05 to 1.13 of the bound on a machine of its own (docs/balance.md); sending all bytes directly, 1.6 on 2x4."""
    moves, _, _ = measured
    assert min(move["move_s"] / move["bound_s"] for move in moves) <= 1.3


def test_every_expert_crosses_to_a_node_once(measured):
    """An expert that all ranks of a node get would add 8 to 20 % each time; headers are 3 %, gloo's messages few."""
    moves, _, sent = measured
    needed = sum(move["bytes"] for move in moves)
    assert needed <= sent < 1.06 * needed


def test_a_dispatch_is_not_delayed_between_steps(measured):
    """By 5 % at most on a machine of its own; rounds with and without a move are in turn."""
    _, iterations, _ = measured
    alone, between = (
        statistics.median(each["dispatch_s"] for each in iterations if (each["share"] > 0) == is_moving)
        for is_moving in (False, True)
    )
    assert between < 1.2 * alone
    assert all(each["progress"] > 0 for each in iterations if each["share"])
