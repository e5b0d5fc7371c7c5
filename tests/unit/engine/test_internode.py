"""CUDA between nodes without a GPU: on simulated nodes every row lands by the law, and every sum comes home."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from simulated_nodes import Stream, on_every_rank, without_a_gpu

from comparison import assert_same_bits, assert_within, world_rows
from fusco import BALANCERS
from fusco.engine.base import DispatchOrder
from fusco.engine.record import Agreement
from fusco.errors import RejectedInputError
from fusco.launch import Launch, StaticSlots
from fusco.memory.layout import Capacity
from fusco.placement import ExpertPlacement
from fusco.planner.routing import Routing
from fusco.settings import Settings
from fusco.topology import Topology
from generator import KINDS, Case, any_bits
from law import Law

TOPOLOGIES = [(2, 2), (4, 1), (3, 2), (2, 3)]  # nodes, ranks of each
HIDDEN, MAX_TOKENS = 5, 14
STREAM = Stream()


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    without_a_gpu(monkeypatch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """What is dispatched, and on which nodes."""

    kind: str
    seed: int
    num_nodes: int
    ranks_per_node: int
    balancer: str = "send-and-receive"
    slice_bytes: int = 64
    alignment: int = 1
    static: StaticSlots | None = None
    wire_dtype: torch.dtype | None = None

    @property
    def topology(self):
        return Topology.of_equal_nodes(self.num_nodes * self.ranks_per_node, self.ranks_per_node)

    @property
    def case(self):
        return Case(
            kind=self.kind,
            seed=self.seed,
            world_size=self.topology.world_size,
            num_experts=2 * self.topology.world_size + 1,
            num_topk=4,
            max_tokens=MAX_TOKENS,
        )

    @property
    def placement(self):
        # Uneven, and out of order.
        owners = [expert * 5 % self.topology.world_size for expert in range(self.case.num_experts)]
        return ExpertPlacement.explicit(owners, self.topology.world_size)

    @property
    def law(self):
        return Law(self.case.world_topk_idx, self.placement.expert_to_rank, self.alignment)

    def run(self, work):
        capacity = Capacity(max_tokens_per_rank=MAX_TOKENS, max_bytes_per_token=96, num_topk=4)
        settings = Settings(slice_bytes=self.slice_bytes, ring_depth=2, wire_dtype=self.wire_dtype)
        return on_every_rank(self.topology, self.placement, capacity, settings, work)

    def order(self, rank, payloads, topk_idx=None):
        ids = self.case.topk_idx(rank) if topk_idx is None else topk_idx
        return DispatchOrder(
            routing=Routing(ids, self.case.topk_weights(rank)),
            payloads=payloads,
            placement=self.placement,
            balancer=BALANCERS[self.balancer],
            expert_alignment=self.alignment,
            static=self.static,
            launch=Launch(),
        )

    def rows(self, dtype, name="x"):
        """Token-major rows of every rank."""
        law = self.law
        return [any_bits((self.case.num_tokens(r), HIDDEN), dtype, self.seed, name, r) for r in law.ranks]


def check_dispatch_and_combine(scene, dtype):
    law, case, x, again = scene.law, scene.case, scene.rows(dtype), scene.rows(torch.uint8, "again")
    y = world_rows(law, HIDDEN, dtype, scene.seed)
    row_bytes = HIDDEN * dtype.itemsize
    wire_dtype = torch.promote_types(dtype, scene.wire_dtype or dtype)

    def work(rank, shuffle, rounds):
        plan, (rows,), rejection = shuffle.dispatch(Agreement("dispatch"), scene.order(rank, [x[rank]]), STREAM)
        assert rejection is None
        assert_same_bits(rows, law.rows(rank, x), "dispatch")
        assert plan.num_rows_per_expert.tolist() == law.counts(rank)
        sent = rounds.profile.internode_row_bytes

        (rows,) = shuffle.dispatch_along(Agreement("dispatch_again"), plan, [again[rank]], Launch(), STREAM)
        assert_same_bits(rows, law.rows(rank, again), "dispatch along the same plan")

        rounds.profile.internode_row_bytes = 0
        out = shuffle.combine(plan, y[rank], wire_dtype, Launch(), STREAM, is_weighted=True)
        assert out.dtype == dtype
        sums = law.sums(rank, y, case.world_topk_weights(), law.ranks)
        assert_within(out, sums.exact, law.error_bound(sums, dtype, scene.wire_dtype, num_journeys=2), "combine")
        plain = shuffle.combine(plan, y[rank], wire_dtype, Launch(), STREAM, is_weighted=False)
        sums = law.sums(rank, y, None, law.ranks)
        assert_within(plain, sums.exact, law.error_bound(sums, dtype, scene.wire_dtype, num_journeys=2), "unweighted")
        return sent, rounds.profile.internode_row_bytes, out

    results = scene.run(work)
    crossings = law.num_crossings(scene.topology.rank_to_node)
    assert sum(sent for sent, _, _ in results) == crossings * row_bytes
    assert sum(home for _, home, _ in results) == 2 * crossings * HIDDEN * wire_dtype.itemsize
    return [out for _, _, out in results]


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), TOPOLOGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_routing(kind, num_nodes, ranks_per_node):
    scene = Scene(kind=kind, seed=KINDS.index(kind), num_nodes=num_nodes, ranks_per_node=ranks_per_node)
    check_dispatch_and_combine(scene, torch.float32)


@pytest.mark.parametrize("slice_bytes", [1, 20, 1000, 1 << 20])
@pytest.mark.parametrize("balancer", BALANCERS)
def test_whatever_the_slices_and_the_balancer(slice_bytes, balancer):
    for seed, kind in enumerate(("ragged with holes", "one rank has all tokens", "ragged and skewed")):
        scene = Scene(
            kind=kind, seed=seed, num_nodes=3, ranks_per_node=2, balancer=balancer, slice_bytes=slice_bytes, alignment=4
        )
        check_dispatch_and_combine(scene, torch.float32)


@pytest.mark.parametrize("wire_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_sums_of_every_dtype(dtype, wire_dtype):
    scene = Scene(kind="ragged", seed=3, num_nodes=3, ranks_per_node=2, wire_dtype=wire_dtype)
    check_dispatch_and_combine(scene, dtype)


@pytest.mark.parametrize("slice_bytes", [1, 40, 1 << 20])
def test_several_payloads_of_odd_widths(slice_bytes):
    for kind in ("ragged", "a rank without tokens", "no tokens"):
        scene = Scene(kind=kind, seed=7, num_nodes=3, ranks_per_node=2, slice_bytes=slice_bytes)
        law, tokens = scene.law, scene.case.num_tokens
        widths = ((torch.uint8, 7), (torch.bfloat16, 3), (torch.float32, 0), (torch.float64, 2), (torch.uint8, 1))
        world = [[any_bits((tokens(r), width), dtype, width, "x", r) for r in law.ranks] for dtype, width in widths]

        def work(rank, shuffle, _, scene=scene, law=law, world=world):
            payloads = [of_ranks[rank] for of_ranks in world]
            _, rows, _ = shuffle.dispatch(Agreement("dispatch"), scene.order(rank, payloads), STREAM)
            for i, (seen, of_ranks) in enumerate(zip(rows, world, strict=True)):
                assert_same_bits(seen, law.rows(rank, of_ranks), f"payload {i}")

        scene.run(work)


def test_static_slots_take_what_fits():
    scene = Scene(kind="ragged", seed=2, num_nodes=2, ranks_per_node=2, static=StaticSlots(9, "drop"))
    law, x = scene.law, scene.rows(torch.float32)

    def work(rank, shuffle, _):
        plan, (rows,), _ = shuffle.dispatch(Agreement("dispatch"), scene.order(rank, [x[rank]]), STREAM)
        expected = law.rows(rank, x)
        assert (plan.num_slots, len(rows)) == (9, 9)
        num_filled = min(9, len(expected))
        assert_same_bits(rows[:num_filled], expected[:num_filled], "what fits")
        return len(expected)

    assert max(scene.run(work)) > 9


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_and_weights_that_are_slices_of_wider_rows(dtype):
    scene = Scene(kind="ragged", seed=5, num_nodes=2, ranks_per_node=2)
    law, case, x = scene.law, scene.case, scene.rows(torch.float32)
    y = world_rows(law, HIDDEN, torch.float32, 5)

    def work(rank, shuffle, _):
        ids, weights = case.topk_idx(rank).to(dtype), case.topk_weights(rank)
        wide = [torch.cat([part, torch.full_like(part, 3)], dim=1)[:, : part.shape[1]] for part in (ids, weights)]
        order = dataclasses.replace(scene.order(rank, [x[rank]]), routing=Routing(*wide))
        plan, (rows,), _ = shuffle.dispatch(Agreement("dispatch"), order, STREAM)
        assert_same_bits(rows, law.rows(rank, x), "dispatch")
        out = shuffle.combine(plan, y[rank], torch.float32, Launch(), STREAM, is_weighted=True)
        sums = law.sums(rank, y, case.world_topk_weights(), law.ranks)
        assert_within(out, sums.exact, law.error_bound(sums, torch.float32, None, num_journeys=2), "combine")

    scene.run(work)


def test_an_id_that_is_no_expert_is_told_to_all_ranks():
    scene = Scene(kind="balanced", seed=0, num_nodes=2, ranks_per_node=2)
    x = scene.rows(torch.float32)
    wrong = scene.case.topk_idx(2).clone()
    wrong[1, 3] = 77

    def work(rank, shuffle, _):
        order = scene.order(rank, [x[rank]], wrong if rank == 2 else None)
        if rank == 2:
            plan, rows, rejection = shuffle.dispatch(Agreement("dispatch"), order, STREAM)
            assert (plan, rows) == (None, [])
            return str(rejection)
        with pytest.raises(RejectedInputError) as raised:
            shuffle.dispatch(Agreement("dispatch"), order, STREAM)
        return str(raised.value)

    for text in scene.run(work):
        assert "topk_idx[1, 3] = 77 is no expert: ids go from 0 to 8" in text
