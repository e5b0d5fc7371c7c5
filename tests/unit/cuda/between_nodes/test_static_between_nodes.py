"""Static rows between nodes: messages of a fixed size have the bits of exact ones, and no host waits for a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated_scenes import EPOCHS, Emulated
from emulator import is_available
from hypothesis import given, settings, strategies as st
from scenes import PAYLOADS, Play, Scene, made_on, play
from simulated_nodes import Rank, SimulatedWatch, request_of

from comparison import assert_same_bits
from fusco import (
    Capacity,
    ExpertPlacement,
    MismatchError,
    RejectedInputError,
    RowOverflowError,
    Settings,
    StaticRows,
    Topology,
)
from fusco.control.fingerprint import CollectiveFingerprint
from fusco.cuda.memory.layout import DeviceLayout
from fusco.engine.base import DispatchRequest
from fusco.planner.routing import Routing
from generator import KINDS

NODES = [(2, 1), (2, 2), (3, 1)]
LIMIT = 4
emulated = pytest.mark.skipif(not is_available, reason="needs a C++ compiler, g++ or clang++")


@pytest.mark.parametrize("payloads", PAYLOADS, ids=len)
def test_rows_and_sums_have_the_bits_of_exact_ones(payloads):
    for order, kind in list(enumerate(KINDS))[PAYLOADS.index(payloads) % 3 :: 3]:
        num_nodes, ranks_per_node = NODES[order % len(NODES)]
        # Another balancer may choose other forwarders, and a forwarder rounds.
        scene = Scene(
            num_nodes=num_nodes,
            ranks_per_node=ranks_per_node,
            kind=kind,
            seed=order,
            balancer="static",
            payloads=payloads,
        )
        exact, static = Play(scene), Play(replace(scene, is_static=True))
        both = exact.run(order), static.run(order + 1)
        static.check(both[1])
        for rank, (ours, theirs) in enumerate(zip(*reversed(both), strict=True)):
            for one, other in zip(ours.sums, theirs.sums, strict=True):
                assert_same_bits(one, other, f"sums of rank {rank}, {kind}")


@given(seed=st.integers(0, 1000), nodes=st.sampled_from(NODES), kind=st.sampled_from(KINDS), order=st.integers(0, 1000))
@settings(max_examples=10)
def test_what_arrives_is_the_law_in_slices_of_any_size(seed, nodes, kind, order):
    scene = Scene(num_nodes=nodes[0], ranks_per_node=nodes[1], kind=kind, seed=seed, slice_bytes=10 * (1 + seed % 20))
    play(replace(scene, is_static=True), order)


def test_no_host_waits_for_a_device(monkeypatch):
    waits: list[Any] = []
    monkeypatch.setattr(SimulatedWatch, "wait_until", lambda *args: waits.append(args))
    scene = Scene(num_nodes=2, ranks_per_node=2, kind="balanced", seed=4)
    play(replace(scene, is_static=True), order=2)
    play(replace(scene, rows_per_expert=4), order=2)
    assert waits == []


class Unlike(Play):
    """Rank 1 passes no static rows, to begin with."""

    def _on_rank(self, at: Rank) -> Any:
        request = self._request(at.rank, self._payloads(at))
        with pytest.raises(MismatchError) as raised:
            at.dispatch(replace(request, static=None) if at.rank == 1 else request)
        super()._on_rank(at)  # all go on
        return str(raised.value)


def test_static_rows_on_some_ranks_only_are_found_before_anything_travels():
    errors = Unlike(Scene(num_nodes=2, ranks_per_node=2, kind="balanced", seed=4, is_static=True)).run(order=1)
    assert set(errors) == {
        "ranks disagree in dispatch: ranks 0, 2, 3 passed static rows, ranks 1 did not. Between nodes messages are of "
        "a fixed size on all ranks or on none"
    }


class Limited(Play):
    """Messages of at most ``limit`` rows: the error of each rank afterwards, and what it has."""

    def __init__(self, scene: Scene, limit: int, on_overflow: Any) -> None:
        super().__init__(scene)
        self._limit, self._on_overflow = limit, on_overflow

    def _request(self, rank: int, payloads: Sequence[torch.Tensor]) -> DispatchRequest:
        static = StaticRows(500, on_overflow=self._on_overflow, max_rows_to_node=self._limit)
        return replace(super()._request(rank, payloads), static=static)

    def _on_rank(self, at: Rank) -> Any:
        output = at.dispatch(self._request(at.rank, self._payloads(at)))
        ones = made_on(at, torch.ones(500, self.scene.hidden, dtype=self.scene.dtype))
        out = at.combine(output.plan, ones, is_weighted=False)
        at.machine_is_idle()
        return at.shuffle.pending_error(), at.shuffle.pending_error(), out


def kept_terms(scene: Scene, rank: int, limit: int) -> torch.Tensor:
    """How many pairs of each token arrive if no more than ``limit`` tokens go to any other node."""
    ids, topology = scene.case.topk_idx(rank), scene.topology
    to_node = scene.placement.membership_table(topology.rank_to_node, ids.device)[ids]
    terms = torch.zeros(len(ids))
    for node in range(topology.num_nodes):
        pairs = to_node == node
        is_kept = pairs.any(1) & (pairs.any(1).cumsum(0) <= limit)
        terms += (pairs.sum(1) * (is_kept if node != topology.rank_to_node[rank] else 1)).float()
    return terms


@pytest.mark.parametrize(
    ("num_nodes", "ranks_per_node", "on_overflow"), [(2, 1, "drop"), (2, 2, "raise"), (3, 1, "raise")]
)
def test_tokens_beyond_the_limit_stay_and_are_reported_once(num_nodes, ranks_per_node, on_overflow):
    scene = Scene(num_nodes=num_nodes, ranks_per_node=ranks_per_node, kind="balanced", seed=3, dtype=torch.float32)
    check_limited(scene, Limited(scene, LIMIT, on_overflow).run(order=num_nodes), on_overflow)


@emulated
@pytest.mark.parametrize("on_overflow", ["raise", "drop"])
def test_the_kernel_leaves_out_tokens_beyond_the_limit(folder, on_overflow):
    scene = Scene(num_nodes=3, ranks_per_node=1, kind="balanced", seed=3, dtype=torch.float32)
    world = Emulated(folder, 1).world(scene.layout, scene.placement)
    check_limited(scene, world.run(Limited(scene, LIMIT, on_overflow)._on_rank), on_overflow)


def check_limited(scene: Scene, outcomes: Sequence[Any], on_overflow: str) -> None:
    """Errors and sums of ``Limited``."""
    limit = LIMIT
    for rank, (error, again, out) in enumerate(outcomes):
        assert again is None
        assert torch.equal(out, kept_terms(scene, rank, limit)[:, None].expand_as(out)), rank
        if on_overflow == "drop":
            assert error is None
            continue
        assert error.node != scene.topology.rank_to_node[rank]
        ids = scene.case.topk_idx(rank)
        to_node = scene.placement.membership_table(scene.topology.rank_to_node, ids.device)[ids]
        needed = int((to_node == error.node).any(1).sum())
        assert (error.num_rows, error.num_rows_needed) == (limit, needed)
        assert str(error).startswith(f"rank {rank} had {needed} tokens for node {error.node} in a dispatch into static")


class Counted(Limited):
    """An exactly sized dispatch right after: it waits for the device, so it knows of the overflow."""

    def _on_rank(self, at: Rank) -> Any:
        payloads = self._payloads(at)
        at.dispatch(self._request(at.rank, payloads))
        with pytest.raises((RowOverflowError, RejectedInputError)) as raised:
            at.dispatch(replace(self._request(at.rank, payloads), static=None))
        return type(raised.value), at.shuffle.pending_error()


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), NODES[1:])
def test_an_overflow_is_told_by_an_exact_dispatch_that_begins_before_the_device_has_found_it(num_nodes, ranks_per_node):
    scene = Scene(num_nodes=num_nodes, ranks_per_node=ranks_per_node, kind="balanced", seed=3, dtype=torch.float32)
    outcomes = Counted(scene, LIMIT, "raise").run(order=1)
    assert {pending for _, pending in outcomes} == {None}
    assert RowOverflowError in {kind for kind, _ in outcomes}


class Misrouted(Play):
    """Rank 1 gives an id that is not an expert; all send what they can."""

    def _on_rank(self, at: Rank) -> Any:
        request = self._request(at.rank, self._payloads(at))
        if at.rank == 1:
            wrong = request.routing.topk_idx.long()
            wrong[2, 1], wrong[3, 0] = 1 << 40, -2
            request = replace(request, routing=Routing(wrong, request.routing.topk_weights))
        at.dispatch(request)
        at.machine_is_idle()
        report = at.arena.report
        return report.bad_static.src, report.bad_static.token, report.bad_static.k, report.bad_static.id


def test_an_id_that_is_no_expert_is_told_on_its_node_only():
    """Nodes that get a row do not know the number of its token."""
    scene = Scene(num_nodes=2, ranks_per_node=2, kind="balanced", seed=4, is_static=True)
    reports = Misrouted(scene).run(order=1)
    assert reports[:2] == [(1, 2, 1, 2**31 - 1)] * 2
    assert [bad_src for bad_src, *_ in reports[2:]] == [-1, -1]


NUM_EXPERTS, NUM_TOPK, NUM_TOKENS, HIDDEN = 8, 2, 8, 4


class Repeated:
    """Dispatches and combines between nodes, one after the other, as replays of a graph are; kernels are emulated."""

    def __init__(self, folder, order: int, topology: Topology, slice_bytes: int) -> None:
        capacity = Capacity(max_tokens_per_rank=NUM_TOKENS, max_bytes_per_token=4 * HIDDEN, num_topk=NUM_TOPK)
        self.layout = DeviceLayout(topology, capacity, Settings(slice_bytes=slice_bytes, ring_depth=2))
        self.placement = ExpertPlacement.contiguous(NUM_EXPERTS, topology.world_size)
        self.world = Emulated(folder, order).world(self.layout, self.placement, num_sms=2)

    def inputs(self, rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids, weights, and rows that are small integers, so that sums are exact."""
        random = torch.Generator().manual_seed(100 * number + rank)
        ids = torch.randint(-1, NUM_EXPERTS, (NUM_TOKENS, NUM_TOPK), generator=random)
        rows = torch.randint(-99, 99, (NUM_TOKENS, HIDDEN), generator=random).float() + 1000 * number
        return ids, torch.randint(1, 5, ids.shape, generator=random).float(), rows

    def request(self, ids: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> DispatchRequest:
        """The same sizes in every call, as in a graph."""
        return request_of(
            Routing(ids, weights),
            rows,
            self.placement,
            static=StaticRows(self.layout.topology.world_size * NUM_TOKENS * NUM_TOPK),
        )


@emulated
@pytest.mark.parametrize(("order", "ranks_per_node", "slice_bytes"), [(0, 1, 40), (1, 2, 4096), (2, 2, 40)])
def test_steps_follow_each_other_without_a_host_while_epochs_wrap_around(folder, order, ranks_per_node, slice_bytes):
    repeated, last = (
        Repeated(folder, order, Topology.of_equal_nodes(2 * ranks_per_node, ranks_per_node), slice_bytes),
        -3,
    )

    def on_rank(at: Rank) -> None:
        at.arena._state[EPOCHS] = last
        at.arena.memory[: repeated.layout.offsets["ids"]].view(torch.int32).fill_(last)
        at.session.agree(CollectiveFingerprint("begin"))  # barrier: no rank begins before all are here
        outputs = []
        for number in range(5):
            inputs = [made_on(at, values) for values in repeated.inputs(at.rank, number)]
            output = at.dispatch(repeated.request(*inputs))
            outputs.append(at.combine(output.plan, output.rows[0], is_weighted=True))
        for number, out in enumerate(outputs):
            ids, weights, rows = repeated.inputs(at.rank, number)
            expected = rows * torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)
            assert torch.equal(out, expected), f"step {number} on rank {at.rank}"

    repeated.world.run(on_rank)
