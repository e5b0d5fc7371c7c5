"""Messages with a row for every token: the bits of counted ones, no wait for counts, and invalid ids on all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from emulated_scenes import Emulated
from emulator import is_available
from scenes import Play, Scene, made_on
from simulated_nodes import Rank, SimulatedWatch

from comparison import assert_same_bits
from fusco.cuda.kernels.plan_forwarding import ForwardingSummary, ForwardingTerms, plan_forwarding
from fusco.planner.routing import Routing
from generator import KINDS
from reference import plan_forwarding as twin

SCENE = Scene(num_nodes=3, ranks_per_node=1, kind="balanced", seed=4)
NUM_CALLS = 4


class Sequence(Play):
    """The same dispatch and combine several times: what each call has, and how many rows it left empty."""

    def _on_rank(self, at: Rank) -> Any:
        calls = []
        for _ in range(NUM_CALLS):
            output = at.dispatch(self._request(at.rank, self._payloads(at)))
            sent = at.profile.internode_row_bytes, at.profile.internode_empty_bytes
            y = made_on(at, self.y[at.rank])
            sums = at.combine(output.plan, y, is_weighted=self.scene.is_weighted)
            moved = at.dispatch_again(output.plan, [made_on(at, rows) for rows in self.x["other x"][at.rank]])
            calls.append((sent, [*output.rows, sums, *moved]))
        return calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_nodes", "slice_bytes"), [(2, 64), (3, 4096)])
def test_rows_and_sums_have_the_bits_of_counted_ones(kind, num_nodes, slice_bytes):
    scene = replace(SCENE, kind=kind, num_nodes=num_nodes, slice_bytes=slice_bytes)
    for rank, calls in enumerate(Sequence(scene).run(order=num_nodes)):
        ((counted_bytes, no_empty), expected), *others = calls
        assert no_empty == 0
        for (sent, empty), tensors in others:
            assert sent - empty == counted_bytes
            assert sent == scene.case.num_tokens(rank) * (num_nodes - 1) * scene.row_bytes
            for one, other in zip(tensors, expected, strict=True):
                assert_same_bits(one, other, f"rank {rank}, {kind}")


def waits_of(scene: Scene) -> list[str]:
    waits: list[str] = []
    wait_until = SimulatedWatch.wait_until

    def noted(watch: SimulatedWatch, is_ready: Any, stall: Any) -> None:
        waits.append(stall().expected)
        wait_until(watch, is_ready, stall)

    with mock.patch.object(SimulatedWatch, "wait_until", noted):
        Sequence(scene).run(order=1)
    return waits


def test_the_host_waits_for_counts_in_the_first_call_only():
    counts = "the number of rows for each node"
    assert waits_of(SCENE).count(counts) == 3
    # Which rank of a node forwards depends on them.
    assert waits_of(replace(SCENE, ranks_per_node=2)).count(counts) == 6 * NUM_CALLS
    with mock.patch("fusco.cuda.between_nodes.message_rows.MAX_EMPTY_BYTES", -1):
        assert waits_of(SCENE).count(counts) == 3 * NUM_CALLS


class Invalid(Play):
    """Rank 1 gives ids that are no experts in its third dispatch, and none in the next."""

    bad_id = 99

    def _on_rank(self, at: Rank) -> Any:
        errors = []
        for number in range(4):
            request = self._request(at.rank, self._payloads(at))
            if number == 2 and at.rank == 1:
                ids = request.routing.topk_idx.long()
                ids[2, 1], ids[3, 0] = self.bad_id, -2
                request = replace(request, routing=Routing(ids, request.routing.topk_weights))
            try:
                at.dispatch(request)
                errors.append("")
            except ValueError as error:
                errors.append(f"{type(error).__name__}: {error}")
        return errors


@pytest.mark.parametrize("bad_id", [99, 1 << 40, -7])
def test_an_invalid_id_is_an_error_of_its_call_on_all_nodes(bad_id):
    play = Invalid(replace(SCENE, seed=3, num_nodes=2))
    play.bad_id = bad_id
    first, second = play.run(order=2)
    assert first[:2] == second[:2] == ["", ""]
    assert first[3] == second[3] == ""
    assert second[2].startswith(f"ValueError: topk_idx[2, 1] = {bad_id} is not an expert")
    told = max(-(2**31) + 1, min(2**31 - 1, bad_id))
    assert first[2].startswith(
        "RejectedInputError: dispatch was cancelled on all ranks, since rank 1 rejected its input: "
        f"topk_idx[2, 1] = {told} is not an expert"
    )


@pytest.mark.skipif(not is_available, reason="needs a C++ compiler, g++ or clang++")
@pytest.mark.parametrize("weights_dtype", [None, torch.float32, torch.float64], ids=str)
def test_the_kernel_sends_invalid_ids_where_its_tokens_have_them(folder, weights_dtype):
    scene = replace(SCENE, num_nodes=2)
    world = Emulated(folder, 0).world(scene.layout, scene.placement, num_sms=2)
    ids = torch.tensor([[0, 3], [1, -1], [7, 12], [-1, -5], [1 << 35, 2]])
    weights = None if weights_dtype is None else torch.rand(5, 2, dtype=weights_dtype)
    terms = ForwardingTerms(5, is_overflow_reported=False, sends_invalid_ids=True, ticket=3)

    def on_rank(at: Rank) -> Any:
        node, table = at.context.node, at.context.expert_to_node
        for routing in (Routing(ids, weights), Routing(ids.clamp(-1, 11), weights)):
            summary = ForwardingSummary(2, node, torch.device("cpu"))
            plan, messages, _ = plan_forwarding(at.context.launcher(at.stream), routing, table, summary, terms)
            at.machine_is_idle()
            with_none = torch.cat([table, table.new_tensor([-1])]).long()
            expected = twin.plan_forwarding(routing, with_none, 2, node, 5, sends_invalid_ids=True)
            assert (summary.num_rows_to_node, summary.bad_pair) == (
                expected.summary[:2].tolist(),
                int(expected.summary[2]),
            )
            assert torch.equal(plan.token_to_place, expected.plan.token_to_place)
            listed = expected.plan.node_to_tokens[1 - node, :5]
            assert torch.equal(plan.node_to_tokens[1 - node, :5], listed)
            begin = 0 if weights is None else weights.nbytes
            packed = messages[0, begin:][: 4 * ids.numel()].view(torch.int32).view(ids.shape)
            assert torch.equal(packed, expected.messages[0].topk_idx)
        return True

    assert world.run(on_rank) == [True, True]


@pytest.mark.skipif(not is_available, reason="needs a C++ compiler, g++ or clang++")
def test_a_launch_is_prepared_for_a_node_and_a_placement(folder):
    world = Emulated(folder, 0).world(SCENE.layout, SCENE.placement, num_sms=2)
    routing, terms = (
        Routing(torch.tensor([[0, 3], [1, 2], [2, 0]]), None),
        ForwardingTerms(None, is_overflow_reported=False, sends_invalid_ids=False, ticket=3),
    )

    def on_rank(at: Rank) -> Any:
        summary, counts = ForwardingSummary(3, 0, torch.device("cpu")), []
        for node, nodes in ((0, [0, 1, 1, 2]), (1, [0, 1, 1, 2]), (1, [2, 1, 2, 2])):
            summary.own_node = node  # as another summary at the same address would have it
            kept = torch.tensor(nodes, dtype=torch.int32)
            plan_forwarding(at.context.launcher(at.stream), routing, kept, summary, terms)
            at.machine_is_idle()
            counts.append((summary.num_rows_to_node, kept))
        return [count for count, _ in counts]

    assert world.run(on_rank)[0] == [[0, 2, 1], [2, 0, 1], [0, 0, 3]]
