"""Ranks that die or do not come, and networks that fail, on emulated kernels: poison, and who is at fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_dispatches import NUM_TOKENS, Repeated, dispatch
from emulated_scenes import EmulatedPlay
from emulator import is_available
from scenes import Scene
from simulated_nodes import Rank

from fusco.control.fingerprint import CollectiveFingerprint
from fusco.core.profile import Call, CallProfile
from fusco.cuda.failure import stall_of
from fusco.cuda.memory.arena import Arena
from fusco.cuda.tuning import MAX_PARTS

pytestmark = [
    pytest.mark.skipif(not is_available, reason="needs a C++ compiler, g++ or clang++"),
    pytest.mark.usefixtures("as_many_blocks_as_for_many_tokens"),
]


def test_a_rank_that_does_not_come_is_named_on_the_device_and_has_the_rows_that_the_plan_did_not_wait_for(folder):
    repeated = Repeated(folder, order=1, num_ranks=3, timeout_s=0.05, patience=1000)

    def on_rank(at: Rank) -> tuple[Arena, torch.Tensor | None]:
        request = repeated.request(at.rank, 0, torch.float32)
        if at.rank == 1:
            pending = at.shuffle.prepare_dispatch(request, Call(1, CallProfile()), at.stream)
            at.session.agree(CollectiveFingerprint("dispatch", request.fields), pending.counts)  # and launches nothing
            return at.arena, None
        return at.arena, dispatch(at, request)[0]

    arenas, outputs = zip(*repeated.world.run(on_rank), strict=True)
    flags_of_rank_1 = arenas[1].memory[repeated.layout.offsets["rows_ready"] :].view(torch.int32)
    num_flags = NUM_TOKENS * MAX_PARTS
    for rank in (0, 2):
        assert (outputs[rank].view(torch.uint8) == 0xFF).all()
        assert 1 in flags_of_rank_1[rank * num_flags : (rank + 1) * num_flags]
        stall = stall_of(arenas[rank].failure, arenas[rank].node_ranks)
        assert stall.phase == "exchanging routing on the device"
        assert stall.on_ranks == (1,)
    assert not arenas[1].failure.is_set


def before_its_plan(at: Rank) -> None:
    at.shuffle._planner.next_ticket = die


def before_it_scatters_rows(at: Rank) -> None:
    program = at.context.program

    def of_the_plan_alone(steps: Any, *sizes: Any) -> Any:
        made = program(steps[:1], *sizes)
        launch = made.launch
        made.launch = lambda *values: (launch(*values), die())
        return made

    at.shuffle._programs.clear()
    at.context.program = of_the_plan_alone


def before_its_combine(at: Rank) -> None:
    at.combine = die


class Died(Exception):  # noqa: N818  no error of the test
    """Ends what a rank launches."""


def die(*_: Any, **__: Any) -> None:
    raise Died


# The phase that the others are in, and how many of the outputs (dispatch, combine) of this replay they complete.
DEATHS = {
    before_its_plan: ("exchanging routing on the device", 0),
    before_it_scatters_rows: ("receiving rows", 0),
    before_its_combine: ("adding partial sums", 1),
}


@pytest.mark.parametrize(
    ("order", "death"), list(enumerate(DEATHS)), ids=lambda death: getattr(death, "__name__", None)
)
def test_a_replay_that_a_rank_has_missed_gives_poison_and_so_do_all_later_ones(death, order, folder):
    repeated = Repeated(folder, order, num_ranks=3, timeout_s=0.3, patience=1000)
    phase, num_complete = DEATHS[death]
    victim, num_replays = 1, 3

    def on_rank(at: Rank) -> Any:
        # As in replays, hosts agree on nothing in between.
        request, call = repeated.request(at.rank, 1, torch.float32), Call(1, CallProfile())
        pending = at.shuffle.prepare_dispatch(request, call, at.stream)
        counts = at.session.agree(CollectiveFingerprint("dispatch", request.fields), pending.counts)
        outputs: list[torch.Tensor] = []
        for replay in range(num_replays):
            if replay == 1 and at.rank == victim:
                death(at)
            try:
                sent = pending.run(counts)
                ones = torch.ones(len(sent.rows[0]), 1)
                outputs += [sent.rows[0], at.combine(sent.plan, ones, is_weighted=False)]
            except Died:
                return None
        at.arena.abort()  # by the host's watch
        return outputs, sent.plan, stall_of(at.arena.failure, at.arena.node_ranks)

    for rank, result in enumerate(repeated.world.run(on_rank)):
        if rank == victim:
            continue
        outputs, plan, stall = result
        assert (stall.phase, stall.on_ranks) == (phase, (victim,))
        is_poison = [bool((output.view(torch.uint8) == 0xFF).all()) for output in outputs]
        num_valid = 2 + num_complete
        assert is_poison == [False] * num_valid + [True] * (2 * num_replays - num_valid)
        num_terms = (repeated.request(rank, 1, torch.float32).routing.topk_idx >= 0).sum(1)
        assert torch.equal(outputs[1][:, 0], num_terms.float())
        assert (plan.tables.row_to_slots == -1).all()
        assert (plan.num_rows_per_expert == 0).all()


class PlayWithoutNetwork(EmulatedPlay):
    """A play after which the network of rank 0 fails, and a dispatch and a combine that show it."""

    def _on_rank(self, at: Rank) -> Any:
        before = super()._on_rank(at)
        torch.zeros(1)  # after all of that
        if at.rank == 0:
            at.arena.abort_after_network()
        sent = at.dispatch(self._request(at.rank, self._payloads(at)))
        out = at.combine(sent.plan, torch.ones(len(sent.rows[0]), 3), is_weighted=False)
        return before, [*sent.rows, out], at.arena


def test_what_depends_on_a_network_that_has_failed_is_poison(folder):
    whole = PlayWithoutNetwork(Scene(num_nodes=2, ranks_per_node=1, kind="balanced"), folder)
    results = whole.run(1)
    whole.check([before for before, _, _ in results])
    for rank, (_, outputs, arena) in enumerate(results):
        assert [bool((output.view(torch.uint8) == 0xFF).all()) for output in outputs] == [rank == 0] * len(outputs)
        assert bool(arena.failure.is_set) == (rank == 0)
    failed = results[0][2]
    assert stall_of(failed.failure, failed.node_ranks).phase == "the network"
