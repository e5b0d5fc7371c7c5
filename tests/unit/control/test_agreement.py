"""Ranks, played by threads with a status server each, agree on the members that are left, whatever fails meanwhile."""

import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

import pytest

import fusco
from fusco.control.agreement import Agreement, Member, notify_excluded
from fusco.control.member_board import View
from fusco.control.member_gather import MemberGather
from fusco.control.status_server import FailureReport, StatusServer

HOST, LIMIT_S = "127.0.0.1", 3.0


class Ranks:
    """Status servers of ranks that know each other."""

    def __init__(self, stack, num_ranks):
        self.servers = {rank: stack.enter_context(closing(StatusServer("secret", HOST))) for rank in range(num_ranks)}
        for rank, server in self.servers.items():
            server.install(View(0, tuple(range(num_ranks))), rank)
        self.members = {rank: Member(each.address, os.getpid(), "host") for rank, each in self.servers.items()}

    def agreement(self, rank, limit_s=LIMIT_S):
        return Agreement(self.servers[rank], rank, self.members, limit_s)

    def run(self, function, ranks):
        """Return a function's result, or what it raises, on each of ``ranks``, all at once."""
        found = {}

        def call(rank):
            try:
                found[rank] = function(rank)
            except Exception as error:  # noqa: BLE001  the caller looks at it
                found[rank] = error

        threads = [threading.Thread(target=call, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def agree(self, proposals, limit_s=LIMIT_S):
        def of_rank(rank):
            with self.agreement(rank, limit_s) as agreement:
                return agreement.agree(proposals[rank])

        return self.run(of_rank, proposals)


@contextmanager
def unanswering(server, reporter):
    """The server's thread waits in a report of another one, as if its process was stopped."""
    with server._installing:
        report = FailureReport((0,), "a report", 0, has_left=False)
        reporter.report_failure({0: server.address}, report, 0.1)
        yield


@pytest.fixture
def ranks():
    with ExitStack() as stack:
        yield Ranks(stack, 4)


def test_all_propose_the_same(ranks):
    found = ranks.agree({rank: {0, 1, 2, 3} for rank in range(4)})
    assert {view.members for view in found.values()} == {(0, 1, 2, 3)}
    assert len({view.number for view in found.values()}) == 1


def test_the_first_view_leaves_out_the_dead_so_that_others_name_them(ranks):
    """Also if the failure that this rank has raised has named nobody to the status server, as one of rails."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    ranks.members[3] = replace(ranks.members[3], pid=ended.pid)
    with ranks.agreement(0) as agreement:
        assert agreement.silent(()) == {3}


def test_ranks_go_on_with_what_all_of_them_hear_of(ranks):
    """Rank 1 knows that 3 is gone, rank 0 does not."""
    found = ranks.agree({0: {0, 1, 2, 3}, 1: {0, 1, 2}, 2: {0, 1, 2, 3}})
    assert {(view.number, view.members) for view in found.values()} == {(found[0].number, (0, 1, 2))}


def test_a_rank_that_does_not_listen_any_more_is_left_out_at_once(ranks):
    ranks.servers[2].close()
    began = time.monotonic()
    found = ranks.agree({rank: {0, 1, 2, 3} for rank in (0, 1, 3)})
    assert {view.members for view in found.values()} == {(0, 1, 3)}
    assert time.monotonic() - began < LIMIT_S / 2


def test_a_rank_that_proposes_nothing_is_left_out_after_the_limit(ranks):
    began = time.monotonic()
    found = ranks.agree({rank: {0, 1, 2, 3} for rank in (0, 1, 2)}, limit_s=0.5)
    assert {view.members for view in found.values()} == {(0, 1, 2)}
    assert 0.5 <= time.monotonic() - began < LIMIT_S


@pytest.mark.timeout(30)
def test_a_rank_that_stops_once_it_has_proposed_is_left_out_after_the_limit(ranks):
    """Rank 0 has its proposal, and waits for the answer to its own."""
    with unanswering(ranks.servers[1], ranks.servers[3]), ranks.agreement(0, 0.5) as agreement:
        ranks.servers[0].board.note_view({"sender": 1, "base": 0, "number": 1, "members": [0, 1], "is_planned": False})
        assert agreement.agree({0, 1}).members == (0,)


def test_a_rank_that_comes_too_late_learns_that_it_is_left_out(ranks):
    found = ranks.agree({0: {0, 1}, 1: {0, 1}})
    for rank in (0, 1):
        ranks.servers[rank].install(found[rank], rank)
    [late] = ranks.agree({3: {0, 1, 2, 3}}).values()
    assert isinstance(late, fusco.ExcludedError)
    assert late.peers == (0, 1)
    notify_excluded(ranks.servers[0], found[0], 0, {2: ranks.members[2].address})
    assert ranks.servers[2].board.exclusion.members == (0, 1)


def test_a_rank_that_others_have_told_before_they_ended_learns_it_first(ranks):
    """Its server has not read the notice yet, as that of a process that was stopped, and nobody is left to ask."""
    with unanswering(ranks.servers[3], ranks.servers[0]):  # the notice is behind the report
        for rank in (0, 1, 2):
            ranks.servers[rank].close()
        addresses = {3: ranks.members[3].address}
        notify = threading.Thread(target=notify_excluded, args=(ranks.servers[0], View(1, (0, 1, 2)), 0, addresses))
        notify.start()
        time.sleep(0.1)
        releasing = threading.Timer(0.3, ranks.servers[3]._installing.release)
        releasing.start()
        [alone] = ranks.agree({3: {3}}).values()
        releasing.join()
        ranks.servers[3]._installing.acquire()
    notify.join()
    assert isinstance(alone, fusco.ExcludedError), alone


def test_a_call_fails_as_soon_as_another_rank_shrinks(ranks):
    def proposes(rank):
        with ranks.agreement(rank, 0.3) as agreement:
            return agreement.agree({0, 1, 2})

    ranks.run(proposes, [0])
    report = ranks.servers[1].failure_report
    assert (report.peers, report.found_by) == ((3,), 0)
    assert "rank 0 has called shrink" in report.reason


def test_only_ranks_that_shrink_go_on_without_one_that_fails(ranks):
    """Rank 2 dies while a process joins: all others raise, as some may have joined it, and the next call is shrink."""
    ranks.servers[2].close()
    have_given_up = threading.Barrier(3)  # one that shrinks before would be what the others name

    def grows(rank):
        match = r"gave up in grow.*waiting for rank\(s\) 2"
        growing = Agreement(ranks.servers[rank], rank, ranks.members, LIMIT_S, "grow")
        with growing as agreement, pytest.raises(fusco.PeerFailureError, match=match):
            agreement.agree({0, 1, 2, 3}, is_planned=True)
        have_given_up.wait(LIMIT_S)
        with ranks.agreement(rank) as agreement:
            return agreement.agree({0, 1, 2, 3} - agreement.silent({2}))

    assert {view.members for view in ranks.run(grows, (0, 1, 3)).values()} == {(0, 1, 3)}


def test_a_rank_that_grows_raises_if_another_shrinks(ranks):
    def agrees(rank):
        operation = "shrink" if rank == 1 else "grow"
        with Agreement(ranks.servers[rank], rank, ranks.members, LIMIT_S, operation) as agreement:
            if rank == 1:
                return agreement.agree({0, 1})
            with pytest.raises(fusco.PeerFailureError, match="have called shrink"):
                agreement.agree({0, 1}, is_planned=True)
        with ranks.agreement(rank) as agreement:
            return agreement.agree({0, 1})

    assert {view.members for view in ranks.run(agrees, (0, 1)).values()} == {(0, 1)}


def test_members_gather_values_until_one_goes_on_to_newer_members(ranks):
    views, have_first = ranks.agree({rank: {0, 1, 3} for rank in (0, 1, 3)}), threading.Barrier(3)

    def gathers(rank):
        with ranks.agreement(rank) as agreement:
            gather = MemberGather(ranks.servers[rank], agreement, views[rank], rank, ranks.members, 4, LIMIT_S)
            gather.begin()
            values = gather.all_gather("first", [rank, "text"])
            have_first.wait(LIMIT_S)
            if rank == 3:
                with ranks.agreement(rank, 0.2) as newer:
                    newer.agree({0, 1, 3})
                return values
            seen_first = r"rank 3 (agrees on other members again|has called shrink)"  # the view, or the report of it
            with pytest.raises(fusco.PeerFailureError, match=seen_first):
                gather.all_gather("second", "never")
            return values

    assert set(map(str, ranks.run(gathers, (0, 1, 3)).values())) == {"[[0, 'text'], [1, 'text'], [3, 'text']]"}


def test_reports_of_another_generation_do_not_count(ranks):
    server = ranks.servers[0]
    old, new = ({"failure": {"peers": [1], "reason": text, "found_by": 1, "has_left": True}} for text in ("old", "new"))
    server.answer(new | {"generation": 5})
    assert server.failure_report is None
    server.install(View(5, (0, 1)), 0)
    assert server.failure_report.reason == "new"
    server.install(View(6, (0, 1)), 0)
    server.answer(old | {"generation": 5})
    assert server.failure_report is None


def test_ranks_that_follow_one_another_propose_under_one_number(ranks):
    """A rank that proposes last takes the number of the others, or they would all begin again."""

    def proposes(rank):
        with ranks.agreement(rank) as agreement:
            time.sleep(0.1 * rank)
            return agreement.agree({0, 1, 2, 3}, is_planned=True)

    found = ranks.run(proposes, range(4))
    assert {(view.number, view.is_planned) for view in found.values()} == {(1, True)}


def test_a_member_that_is_through_with_a_gather_does_not_end_that_of_others(ranks):
    """Rank 0 has all values, and proposes the members that ``grow`` has found, while rank 1 has not looked yet."""
    view = View(0, (0, 1))
    is_through = threading.Event()

    def gathers(rank):
        server = ranks.servers[rank]
        with ranks.agreement(rank) as agreement:
            gather = MemberGather(server, agreement, view, rank, ranks.members, 4, LIMIT_S)
            if rank == 1:
                server.board.values(0, "joiners")[1] = "value"
                ranks.servers[0].board.note_value({"number": 0, "stage": "joiners", "sender": 1, "value": "value"})
                assert is_through.wait(LIMIT_S)
            values = gather.all_gather("joiners", "value")
            if rank == 0:
                server.board.proposed = View(1, (0, 1, 2), is_planned=True)
                message = {"sender": 0, "base": 0, "number": 1, "members": [0, 1, 2], "is_planned": True}
                ranks.servers[1].answer({"view": message})
                is_through.set()
        return values

    assert ranks.run(gathers, (0, 1)) == {0: ["value"] * 2, 1: ["value"] * 2}


@pytest.fixture
def gather_of_0(ranks):
    """Rank 0's gather of ``stage``, for which rank 1 has sent its value."""
    ranks.servers[0].board.note_value({"number": 0, "stage": "stage", "sender": 1, "value": "of 1"})
    with ranks.agreement(0) as agreement:
        yield MemberGather(ranks.servers[0], agreement, View(0, (0, 1)), 0, ranks.members, 4, 0.5)


def test_a_member_that_has_sent_its_value_and_stops_is_named(ranks, gather_of_0):
    seen = r"waiting for rank\(s\) 1: expected all 2 ranks, saw 1\."
    with unanswering(ranks.servers[1], ranks.servers[3]), pytest.raises(fusco.PeerFailureError, match=seen) as failure:
        gather_of_0.all_gather("stage", "of 0")
    assert failure.value.peers == (1,)


def test_a_member_that_agrees_again_is_named_though_all_values_have_come(ranks, gather_of_0):
    """Rank 1 has called ``shrink``, and has not yet answered that it has rank 0's value."""
    seen = r"waiting for rank\(s\) 1: expected all 2 ranks, saw 1\. Cause: rank 1 agrees on other members again"
    ranks.servers[0].board.note_view({"sender": 1, "base": 0, "number": 1, "members": [0, 1], "is_planned": False})
    with unanswering(ranks.servers[1], ranks.servers[3]), pytest.raises(fusco.PeerFailureError, match=seen):
        gather_of_0.all_gather("stage", "of 0")


def test_a_process_whose_place_another_has_taken_is_left_out(ranks):
    server, message = ranks.servers[0], {"sender": 3, "number": 9, "members": [0, 1, 3], "is_planned": False}
    server.install(View(2, (0, 1, 2)), 0)
    server.install(View(3, (0, 1, 2, 3)), 0)
    assert server.answer({"view": message | {"base": 1}})["excluded"]["told_by"] == 0
    assert 3 not in server.board.views
    assert server.answer({"view": message | {"base": 2}}) == {}  # it has joined, and others wait for it
    assert server.board.views[3].number == 9
