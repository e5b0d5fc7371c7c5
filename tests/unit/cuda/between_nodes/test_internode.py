"""CUDA between nodes on simulated devices: what arrives is the law, however it is sliced and whatever runs first.

Everything but the kernels, NCCL and the exchange of records is the very code that runs on a GPU: which rows a slice
has, their places in rings and pools, the arguments of each kernel, and which stream waits for which.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from scenes import ID_LAYOUTS, NUM_EXPERTS, PAYLOADS, Play, Scene, made_on, play
from simulated_device import Machine
from simulated_kernels import SimulatedKernel
from simulated_nodes import Rank, World, request_of

from comparison import assert_same_bits
from fusco import BALANCERS, Capacity, ExpertPlacement, Groups, Launch, MismatchError, Quantize, Settings, Topology
from fusco.control.fingerprint import CollectiveFingerprint
from fusco.core.profile import CallProfile
from fusco.cuda.memory.layout import DeviceLayout
from fusco.planner.routing import Routing
from generator import KINDS


@st.composite
def scenes(draw):
    num_nodes = draw(st.integers(2, 4))
    return Scene(
        num_nodes=num_nodes,
        ranks_per_node=draw(st.integers(1, 4)),
        kind=draw(st.sampled_from(KINDS)),
        seed=draw(st.integers(0, 1000)),
        are_nodes_interleaved=draw(st.booleans()),
        balancer=draw(st.sampled_from([*sorted(BALANCERS), "scattered", "scattered"])),
        # From a row for each other node in a slice to all rows in one.
        slice_bytes=draw(st.sampled_from([1, 16, 40])) * num_nodes * draw(st.integers(1, 12)),
        ring_depth=draw(st.integers(2, 3)),
        payloads=draw(st.sampled_from(PAYLOADS)),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float64])),
        wire_dtype=draw(st.sampled_from([None, torch.float32])),
        hidden=draw(st.sampled_from([1, 5, 8])),
        alignment=(alignment := draw(st.sampled_from([1, 4]))),
        rows_per_expert=draw(st.none() | st.sampled_from([alignment, 4 * alignment, 64])),
        is_static=draw(st.booleans()),
        is_weighted=draw(st.booleans()),
        id_layout=draw(st.sampled_from(sorted(ID_LAYOUTS))),
    )


@given(scene=scenes(), order=st.integers(0, 1000))
@settings(max_examples=15)
def test_what_arrives_is_the_law_for_any_shape_and_in_any_order(scene, order):
    play(scene, order)


@pytest.mark.parametrize(
    ("num_nodes", "ranks_per_node", "dtype", "slice_bytes", "quantize"),
    [
        (2, 1, torch.bfloat16, 300, Quantize(block=16)),
        (3, 2, torch.float32, 300, Quantize(block=32, scale="power-of-two")),
        (3, 2, torch.bfloat16, 4096, Quantize(block=16)),
    ],
    ids=str,
)
def test_sums_that_travel_quantised_are_within_their_bound(num_nodes, ranks_per_node, dtype, slice_bytes, quantize):
    for seed in range(4):
        scene = Scene(
            num_nodes=num_nodes,
            ranks_per_node=ranks_per_node,
            kind=KINDS[seed],
            seed=seed,
            slice_bytes=slice_bytes,
            dtype=dtype,
            hidden=64,
            wire_dtype=quantize,
            is_static=seed % 2 == 1,
        )
        play(scene, order=seed)


@pytest.mark.parametrize(("seed", "layout"), list(enumerate(sorted(ID_LAYOUTS), 3)))  # int64 and int32
def test_routing_may_stand_in_memory_in_any_order(layout, seed):
    play(Scene(num_nodes=2, ranks_per_node=2, kind="balanced", seed=seed, id_layout=layout), order=0)


@pytest.mark.parametrize("kind", ["ragged and skewed", "repeated experts"])
def test_sums_depend_neither_on_slices_nor_on_what_runs_first(kind):
    scene = Scene(num_nodes=3, ranks_per_node=2, kind=kind, seed=4, slice_bytes=20)
    in_rows = Play(scene).run(order=0)
    at_once = Play(replace(scene, slice_bytes=4096, ring_depth=3)).run(order=1)
    for rank, (one, other) in enumerate(zip(in_rows, at_once, strict=True)):
        num_slices, num_other = (max(map(len, outcome.plan._slices.values())) for outcome in (one, other))
        assert num_slices > num_other >= 1
        for ours, theirs in zip(one.sums, other.sums, strict=True):
            assert_same_bits(ours, theirs, f"sums of rank {rank}")


def test_rows_and_routing_for_all_nodes_are_packed_in_one_launch_each(monkeypatch):
    launches, launch = Counter(), SimulatedKernel.launch
    monkeypatch.setattr(
        SimulatedKernel, "launch", lambda self, *a, **k: launches.update([self.name]) or launch(self, *a, **k)
    )
    scene = Scene(num_nodes=4, ranks_per_node=1, kind="balanced", seed=3, slice_bytes=1 << 14)
    world = World(scene.layout, scene.placement, Machine(0))
    num_slices = world.run(Play(scene)._on_rank)[0].plan.traffic.num_slices(
        scene.layout.rows_per_slice(scene.row_bytes)
    )
    # For each rank its rows slice by slice, twice; routing is packed where rows are counted.
    assert launches["gather_rows"] == 4 * 2 * num_slices
    assert launches["plan_forwarding"] == 4
    for rank in range(4):
        first = world.nccl.exchanges[rank][0]
        assert len(first.sends) == len(first.receives) == 3 * 2  # to each other node its rows, and routing


class Profiled(Play):
    """A dispatch and another of the same routing: what each took by its profile, and by the clock."""

    def _on_rank(self, at: Rank) -> Any:
        launch = Launch(num_sms=20)
        request = replace(self._request(at.rank, self._payloads(at)), launch=launch)
        others = [made_on(at, rows) for rows in self.x["other x"][at.rank]]
        seen: list[tuple[CallProfile, float]] = []

        def profiled(call: Callable[[], Any]) -> Any:
            start = time.perf_counter()
            result = call()
            seen.append((at.profile, time.perf_counter() - start))
            return result

        y = made_on(at, self.y[at.rank])
        plan = profiled(lambda: at.dispatch(request)).plan
        profiled(lambda: at.dispatch_again(plan, others, launch))
        profiled(lambda: at.combine(plan, y, launch, is_weighted=False))
        return seen


@pytest.mark.parametrize(("num_nodes", "slice_bytes"), [(1, 16), (2, 16), (2, 4096)])
def test_profiles_tell_launch_times_by_kind_and_multiprocessors_taken_at_once(num_nodes, slice_bytes):
    scene = Scene(num_nodes=num_nodes, ranks_per_node=2, kind="balanced", seed=3, slice_bytes=slice_bytes)
    for dispatched, again, combined in Profiled(scene).run(order=0):
        for profile, elapsed_s in (dispatched, again):
            assert profile.wire_s > 0
            assert profile.planning_s > 0  # of a dispatch along an earlier plan, what agreeing takes
            assert profile.planning_s + profile.wire_s <= elapsed_s  # nothing twice
        assert [profile.num_sms for profile, _ in (dispatched, again, combined)] == [20] * 3


@dataclass(frozen=True)
class Three:
    """Three nodes of one rank and one expert each; the token of rank 1 goes to all of them."""

    rows: tuple[float, float, float]

    def sum(self) -> float:
        placement = ExpertPlacement.contiguous(3, 3)
        capacity = Capacity(max_tokens_per_rank=1, max_bytes_per_token=4, num_topk=3)
        layout = DeviceLayout(Topology((0, 1, 2)), capacity, Settings(slice_bytes=64))
        return World(layout, placement, Machine(0)).run(self._on_rank)[1]

    def _on_rank(self, at: Rank) -> float:
        num_tokens = int(at.rank == 1)
        request = request_of(
            Routing(torch.arange(3).expand(num_tokens, 3)), torch.ones(num_tokens, 1), ExpertPlacement.contiguous(3, 3)
        )
        plan = at.dispatch(request).plan
        y = torch.tensor([[self.rows[at.rank]]])
        out = at.combine(plan, y, is_weighted=False)
        return float(out.sum())


def test_the_own_nodes_sum_comes_first_then_the_others_ascending():
    # In float32, (1e8 + 1) - 1e8 is 0, and (1e8 - 1e8) + 1 is 1.
    assert Three((1.0, 1e8, -1e8)).sum() == 0.0
    assert Three((-1e8, 1e8, 1.0)).sum() == 1.0
    assert Three((1e8, 1.0, -1e8)).sum() == 0.0


class Misrouted(Play):
    """Rank 1 gives an id that is not an expert, to begin with."""

    def _on_rank(self, at: Rank) -> Any:
        request = self._request(at.rank, self._payloads(at))
        wrong = request.routing.topk_idx.clone()
        wrong[2, 1], wrong[3, 0] = NUM_EXPERTS, -2
        if at.rank == 1:
            request = replace(request, routing=Routing(wrong))
        rejection = None
        try:
            at.dispatch(request)
        except ValueError as error:
            rejection = error
        super()._on_rank(at)  # all go on
        return rejection


def test_an_id_that_is_no_expert_is_refused_on_all_ranks_which_go_on():
    scene = Scene(num_nodes=2, ranks_per_node=2, kind="balanced", seed=4, is_weighted=False)
    refused = Misrouted(scene).run(order=1)
    what = f"topk_idx[2, 1] = {NUM_EXPERTS} is not an expert: ids go from 0 to {NUM_EXPERTS - 1}, and -1 means none"
    assert type(refused[1]) is ValueError
    assert str(refused[1]) == what
    for rank in (0, 2, 3):
        assert str(refused[rank]) == f"dispatch was cancelled on all ranks, since rank 1 rejected its input: {what}"


class Disagreeing(Play):
    """Rank 3's balancer gives other groups than those of the other ranks, to begin with."""

    def _on_rank(self, at: Rank) -> Any:
        request = self._request(at.rank, self._payloads(at))
        balancers = [
            lambda traffic: Groups(traffic.topology, ((0, 1), (1, 0))),
            lambda traffic: Groups.of_same_local_rank(traffic.topology),
        ]
        with pytest.raises(MismatchError) as raised:
            at.dispatch(replace(request, balancer=balancers[at.rank == 3]))
        super()._on_rank(at)  # all go on
        return str(raised.value)


def test_balancers_that_disagree_are_found_before_anything_travels():
    scene = Scene(num_nodes=2, ranks_per_node=2, kind="balanced", seed=4, is_weighted=False)
    errors = Disagreeing(scene).run(order=1)
    assert set(errors) == {
        "ranks disagree in dispatch: the balancer's result is ((0, 1), (1, 0)) on ranks 0, 1, 2, ((0, 0), (1, 1)) "
        "on rank 3. A balancer must be pure, and the same on all ranks: equal traffic, equal groups or lanes"
    }


def test_once_an_arena_is_closed_nothing_has_a_view_of_its_memory():
    """PyTorch ends the process if such memory is freed later, while a graph is captured."""
    topology, placement = Topology((0, 0, 1, 1)), ExpertPlacement.contiguous(8, 4)

    def num_views(memory: torch.Tensor) -> int:
        return sum(type(each) is torch.Tensor and each._base is memory for each in gc.get_objects())

    def program(at: Rank) -> tuple[int, int]:
        request = request_of(Routing(torch.arange(16).view(8, 2) % 8), torch.ones(8, 4), placement)
        sent = at.dispatch(request)
        at.combine(sent.plan, sent.rows[0], is_weighted=False)
        at.machine_is_idle()
        memory = at.arena.memory
        before = num_views(memory)
        at.arena.close()
        at.session.agree(CollectiveFingerprint("closed"))
        return before, num_views(memory)

    layout = DeviceLayout(topology, Capacity(max_tokens_per_rank=8, max_bytes_per_token=16, num_topk=2), Settings())
    for before, after in World(layout, placement, Machine(0)).run(program):
        assert before > after == 0
