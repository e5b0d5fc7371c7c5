"""Ranks that die, stop, are missing or raise, at every step: all others name them and the step in time, and survive."""

import os
import signal
import time
from contextlib import contextmanager

import pytest
from fault_jobs import TIMEOUT_S, check_often, die, exchange, fail, move, nap, oversleep, stop
from struck_worlds import (
    CLOSING_S,
    ONE_NODE,
    SLACK_S,
    TWO_NODES,
    assert_all_name_the_victims,
    assert_broken,
    collect,
    strike,
)

from fusco.schedule import warm_up

pytestmark = [pytest.mark.multirank, pytest.mark.alone, pytest.mark.cpu_only, pytest.mark.timeout(60)]

CHECKED_S = 0.1  # on a machine that is not loaded
TRIES = 3
AHEAD = 4  # worlds that wait for the time limit meanwhile; their ranks hardly compute

STORE_GATHER = "fusco.control.store_gather:StoreGather.all_gather"
CONNECTING = "fusco.control.tcp_transport:TcpTransport.__init__"  # for records, then for rows
REUSE = "fusco.control.record_exchange:RecordExchange.wait_for_peers_done"
RECORDS = "fusco.control.record_exchange:RecordExchange.exchange_records"
ROUTING = "fusco.cpu.routing_exchange:RoutingExchange.exchange"
SENDING = "fusco.cpu.dispatch:SendRows.step"
SCATTERING = "fusco.cpu.dispatch:ScatterRows.step"
PRODUCING = "fusco.cpu.combine:ProducePartialSums.step"
FOLDING = "fusco.cpu.combine:FoldSums.step"
DISPATCHING = "fusco.cpu.engine:CpuEngine.prepare_redispatch"
SHUFFLING = "fusco.cpu.all_to_all:SendWithin.step"
OUTSIDE = "fault_jobs:between_calls"

# Places of faults: (ranks, ranks per node), victims, the method, its successful calls before the fault.
PLACES = {
    "between calls": (TWO_NODES, (0,), OUTSIDE, 0),
    "before its record": (ONE_NODE, (0,), RECORDS, 1),
    "sending rows": (TWO_NODES, (2,), SENDING, 3),
    "producing partial sums": (ONE_NODE, (3,), PRODUCING, 2),
    "backward": (TWO_NODES, (3,), DISPATCHING, 1),
    "shuffling": (TWO_NODES, (0,), SHUFFLING, 2),
    "two ranks of different nodes": (TWO_NODES, (1, 2), OUTSIDE, 0),
}
MORE_PLACES = {
    "before reuse of shared memory": (ONE_NODE, (2,), REUSE, 1),
    "before its record, on another node": (TWO_NODES, (3,), RECORDS, 0),
    "before its routing": (TWO_NODES, (1,), ROUTING, 0),
    "sending rows, one rank a node": ((2, 1), (0,), SENDING, 3),
    "scattering rows": (TWO_NODES, (0,), SCATTERING, 3),
    "folding sums": (TWO_NODES, (1,), FOLDING, 3),
    "two ranks of one node": (TWO_NODES, (0, 1), SCATTERING, 2),
}
SMALL_PLACES = {  # of combines that attach their sums
    "before the record of a combine": (TWO_NODES, (3,), RECORDS, 1),
    "adding the sums of its node": (TWO_NODES, (1,), "fusco.cpu.combine:AttachedSums.attach", 0),
    "adding the sums of other nodes": (TWO_NODES, (2,), "fusco.cpu.combine:AttachedSums.finish", 1),
}
EXCHANGES = {
    "sending within the node": (TWO_NODES, (1,), "fusco.cpu.all_to_all:SendWithin.step", 5),
    "receiving within the node": (TWO_NODES, (0,), "fusco.cpu.all_to_all:ReceiveWithin.step", 4),
    "sending to other nodes": (TWO_NODES, (2,), "fusco.cpu.all_to_all:SendAcross.step", 3),
    "receiving from other nodes": ((2, 1), (1,), "fusco.cpu.all_to_all:ReceiveAcross.step", 3),
}
MOVES = {
    "sending an expert": (TWO_NODES, (2,), "fusco.cpu.all_to_all:SendAcross.step", 5),
    "between steps": (TWO_NODES, (0,), "fusco.api.move_task:RankTransfers.request", 3),
    "with all its experts": (ONE_NODE, (1,), "fusco.api.moves:ExpertMoves._end_move", 0),
    "as it puts its experts down": (TWO_NODES, (3,), "fusco.api.placement_move:PlacementMove.put", 0),
}
STAGES = {
    "before anything": (STORE_GATHER, 0),
    "before it can send records": (CONNECTING, 0),
    "before it connects": (CONNECTING, 1),
    "before it has memory": (STORE_GATHER, 3),
    "before it has mapped its peers' memory": (STORE_GATHER, 4),
}


def stops(places, **of_all):
    names = ("topology", "victims", "where", "num_calls_before")
    return {place: {**dict(zip(names, at, strict=True)), "how": stop, **of_all} for place, at in places.items()}


# Faults that others detect after the time limit, in the order of their tests: arguments of ``strike``.
LATE = {
    **stops(PLACES),
    **stops(SMALL_PLACES, is_small=True),
    "in an all-to-all": {
        "how": stop,
        "victims": (2,),
        "where": EXCHANGES["sending to other nodes"][2],
        "num_calls_before": 3,
        "work": exchange,
    },
    **{
        f"making, {stage}": {"how": stop, "victims": (2,), "where": where, "num_calls_before": num, "when": "making"}
        for stage, (where, num) in STAGES.items()
    },
    "dies before anything": {"how": die, "victims": (2,), "where": STORE_GATHER, "when": "making"},
    "closing": {"how": stop, "victims": (3,), "where": RECORDS, "when": "closing"},
    "missing": {"how": oversleep, "victims": (1,), "where": OUTSIDE},
    "not forked": {"how": stop, "victims": (1,), "where": SENDING, "num_calls_before": 3, "start_method": "spawn"},
}


@pytest.fixture(scope="module")
def late(tmp_path_factory):
    """Return a context of a case in ``LATE``. The next ones are started before it is used, so that waits overlap."""
    warm_up()  # compiling takes longer than the limit
    names, waiting, started = list(LATE), dict(LATE), {}

    @contextmanager
    def take(name):
        for other in names[names.index(name) :][: 1 + AHEAD]:
            if other in waiting:
                started[other] = strike(tmp_path_factory.mktemp("fault"), **waiting.pop(other))
        struck = started.pop(name)
        with struck:
            yield struck

    yield take
    for struck in started.values():  # of tests that were not selected
        struck.world.kill()


@pytest.mark.parametrize(
    ("topology", "victims", "where", "num_calls_before", "is_small"),
    [(*place, places is SMALL_PLACES) for places in (PLACES, MORE_PLACES, SMALL_PLACES) for place in places.values()],
    ids=[*PLACES, *MORE_PLACES, *SMALL_PLACES],
)
def test_death_is_detected_at_once(tmp_path, topology, victims, where, num_calls_before, is_small):
    fault = {"how": die, "victims": victims, "where": where, "num_calls_before": num_calls_before, "is_small": is_small}
    with strike(tmp_path, topology=topology, **fault) as struck:
        fates = struck.fates()
    assert_all_name_the_victims(fates, struck.fault, within_s=TIMEOUT_S / 2)
    assert_broken(fates)


def test_a_check_raises_within_a_tenth_of_a_second_after_a_death(tmp_path):
    for left in reversed(range(TRIES)):
        with strike(tmp_path, how=die, victims=(2,), where=OUTSIDE, work=check_often) as struck:
            fates = struck.fates()
        assert_all_name_the_victims(fates, struck.fault, within_s=TIMEOUT_S / 2)
        assert_broken(fates)
        took_s = max(fate.raised_at for fate in fates.values()) - struck.fault.struck_at
        if took_s < CHECKED_S:
            return
        assert left, took_s


@pytest.mark.parametrize(("topology", "victims", "where", "num_calls_before"), EXCHANGES.values(), ids=EXCHANGES)
def test_death_in_an_all_to_all_is_detected_at_once(tmp_path, topology, victims, where, num_calls_before):
    warm_up()  # compiling takes longer than the limit
    fault = {"how": die, "victims": victims, "where": where, "num_calls_before": num_calls_before}
    with strike(tmp_path, topology=topology, work=exchange, **fault) as struck:
        fates = struck.fates()
    assert_all_name_the_victims(fates, struck.fault, within_s=TIMEOUT_S / 2)
    assert all("gave up in all_to_all #" in fate.text for fate in fates.values())
    assert_broken(fates)


@pytest.mark.parametrize(("topology", "victims", "where", "num_calls_before"), MOVES.values(), ids=MOVES)
def test_death_in_a_move_is_detected_at_once_and_leaves_whole_experts(
    tmp_path, topology, victims, where, num_calls_before
):
    warm_up()  # compiling takes longer than the limit
    fault = {"how": die, "victims": victims, "where": where, "num_calls_before": num_calls_before}
    with strike(tmp_path, topology=topology, work=move, **fault) as struck:
        fates = struck.fates()
    assert_all_name_the_victims(fates, struck.fault, within_s=TIMEOUT_S / 2)
    assert all("gave up in move_experts" in fate.text for fate in fates.values())
    assert_broken(fates)


@pytest.mark.parametrize("place", [*PLACES, *SMALL_PLACES])
def test_a_stopped_rank_is_detected_within_the_limit(late, place):
    with late(place) as struck:
        fates, victims = struck.fates(), struck.fault.victims
        for victim in victims:
            os.kill(struck.world.processes[victim].pid, signal.SIGCONT)
        continued_at = time.monotonic()
        continued = collect(struck.world, list(victims))
    assert_all_name_the_victims(fates, struck.fault, within_s=TIMEOUT_S + SLACK_S)
    assert_broken(fates)
    for fate in continued.values():  # its next wait fails, too, as the others have sent it their failure report
        assert fate.peers == victims
        assert fate.raised_at - continued_at < TIMEOUT_S / 2
        assert fate.still_held == []


def test_a_rank_that_stops_in_an_all_to_all_is_detected_within_the_limit(late):
    with late("in an all-to-all") as struck:
        fates = struck.fates()
    assert_all_name_the_victims(fates, struck.fault, within_s=TIMEOUT_S + SLACK_S)
    assert_broken(fates)


@pytest.mark.parametrize("case", [*(f"making, {stage}" for stage in STAGES), "dies before anything", "closing"])
def test_a_rank_is_named_that_others_do_not_see_fail_as_they_make_or_close_the_communicator(late, case):
    with late(case) as struck:
        fates = struck.fates()
    assert_all_name_the_victims(fates, struck.fault, within_s=TIMEOUT_S + SLACK_S)


def test_a_missing_rank_is_named_and_gets_the_failure_report(late):
    with late("missing") as struck:
        fates = collect(struck.world, range(4))
    others = {rank: fates[rank] for rank in (0, 2, 3)}
    assert_all_name_the_victims(others, struck.fault, within_s=TIMEOUT_S + SLACK_S)
    assert_broken(fates)
    assert all("rank 1 has been outside any fusco call" in fate.text for fate in fates.values())


def test_survivors_of_a_stop_exit_normally(late):
    """Not forked: forked processes skip most of the interpreter's end."""
    with late("not forked") as struck:
        fates = struck.fates()
    assert_all_name_the_victims(fates, struck.fault, within_s=TIMEOUT_S + SLACK_S)


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "before anything"])
def test_a_rank_dies_while_the_communicator_is_made(tmp_path, stage):
    where, num_calls_before = STAGES[stage]
    fault = {"how": die, "victims": (2,), "where": where, "num_calls_before": num_calls_before, "when": "making"}
    with strike(tmp_path, **fault) as struck:
        fates = struck.fates()
    assert_all_name_the_victims(fates, struck.fault, within_s=TIMEOUT_S + SLACK_S)


def test_a_rank_that_dies_while_closing_is_not_waited_for(tmp_path):
    with strike(tmp_path, how=die, victims=(0,), where=RECORDS, when="closing") as struck:
        fates = struck.fates()
    for fate in fates.values():
        assert not fate.text
        assert fate.closing_s < CLOSING_S
        assert fate.still_held == []


def test_a_rank_that_is_late_but_within_the_timeout_is_waited_for(tmp_path):
    with strike(tmp_path, how=nap, victims=(1,), where=OUTSIDE) as struck:
        fates = collect(struck.world, range(4))
    assert [fate.text for fate in fates.values()] == [""] * 4


def test_a_rank_that_raises_notifies_the_others_at_once(tmp_path):
    with strike(tmp_path, how=fail, victims=(2,), where=OUTSIDE) as struck:
        [(is_ok, failure)] = struck.world.collect([2])
        fates = struck.fates()
    assert not is_ok
    assert failure.sentence == "ZeroDivisionError: a bug of the caller"
    assert "fault_jobs.py" in failure.traceback
    assert_all_name_the_victims(fates, struck.fault, within_s=TIMEOUT_S / 2)
    assert_broken(fates)
    assert all("ZeroDivisionError: a bug of the caller" in fate.text for fate in fates.values())


def test_survivors_of_a_death_exit_normally(tmp_path):
    fault = {"how": die, "victims": (1,), "where": SENDING, "num_calls_before": 3}
    with strike(tmp_path, start_method="spawn", **fault) as struck:
        fates = struck.fates()
    assert_all_name_the_victims(fates, struck.fault, within_s=TIMEOUT_S + SLACK_S)
