"""Scenes on simulated devices: what ranks of several nodes dispatch and combine, and what must arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from simulated_device import Machine
from simulated_nodes import Rank, World

from comparison import assert_same_bits, assert_within, world_rows
from fusco import BALANCERS, Balancer, Capacity, ExpertPlacement, Launch, Quantize, Settings, StaticRows, Topology
from fusco.cuda.between_nodes.plan import InternodePlan
from fusco.cuda.memory.layout import DeviceLayout
from fusco.engine.base import DispatchRequest
from fusco.planner.routing import Routing, routing_bytes_per_row
from generator import Case, any_bits, number_of
from law import Law
from scattered_lanes import ScatteredLanes

NUM_EXPERTS = 12
PAYLOADS = (
    ((torch.bfloat16, (5,)),),
    ((torch.float32, (8,)),),
    ((torch.uint8, (3,)), (torch.float32, (4,)), (torch.float64, ())),
    ((torch.float8_e4m3fn, (32,)), (torch.float32, (1,))),
)
ID_LAYOUTS = {
    "rows": torch.Tensor.clone,
    "columns": lambda ids: ids.T.contiguous().T,
    "half of wider rows": lambda ids: torch.cat([ids, ids], dim=1)[:, : ids.shape[1]],
    "behind another number": lambda ids: torch.cat([ids.new_zeros(1), ids.view(-1)])[1:].view(ids.shape),
}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A world, its routing, and how it is to be moved."""

    num_nodes: int
    ranks_per_node: int
    kind: str = "ragged with holes"
    seed: int = 0
    are_nodes_interleaved: bool = False
    balancer: str = "scattered"
    slice_bytes: int = 64
    ring_depth: int = 2
    payloads: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = PAYLOADS[0]
    dtype: torch.dtype = torch.bfloat16
    wire_dtype: torch.dtype | Quantize | None = None
    hidden: int = 5
    alignment: int = 1
    is_static: bool = False
    rows_per_expert: int | None = None  # of masked rows; those that do not fit are dropped
    is_weighted: bool = True
    id_layout: str = "rows"

    @property
    def topology(self) -> Topology:
        world_size = self.num_nodes * self.ranks_per_node
        if self.are_nodes_interleaved:
            return Topology(tuple(rank % self.num_nodes for rank in range(world_size)))
        return Topology.of_equal_nodes(world_size, self.ranks_per_node)

    @property
    def case(self) -> Case:
        return Case(
            kind=self.kind,
            seed=self.seed,
            world_size=self.topology.world_size,
            num_experts=NUM_EXPERTS,
            num_topk=1 + self.seed % 5,
            max_tokens=9,
        )

    @cached_property
    def placement(self) -> ExpertPlacement:
        """Equal shares, or any; some ranks may have no expert then."""
        world_size = self.topology.world_size
        if self.seed % 2 and NUM_EXPERTS % world_size == 0:
            return ExpertPlacement.contiguous(NUM_EXPERTS, world_size)
        owners = [number_of(0, world_size - 1, self.seed, "owner", e) for e in range(NUM_EXPERTS)]
        return ExpertPlacement.explicit(owners, world_size)

    @cached_property
    def law(self) -> Law:
        return Law(self.case.world_topk_idx, self.placement.expert_to_rank, self.alignment, self.rows_per_expert)

    def static(self, rank: int) -> StaticRows | None:
        """Static rows of a rank."""
        if self.rows_per_expert:
            return StaticRows(rows_per_expert=self.rows_per_expert, on_overflow="drop")
        return StaticRows(len(self.law.slots(rank)) + 2) if self.is_static else None

    @property
    def chosen_balancer(self) -> Balancer:
        if self.balancer == "scattered":
            return ScatteredLanes(self.case.max_tokens * (self.num_nodes - 1))
        return BALANCERS[self.balancer]

    @property
    def sent_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, self.sum_dtype or self.dtype)

    @property
    def sum_dtype(self) -> torch.dtype | None:
        return None if isinstance(self.wire_dtype, Quantize) else self.wire_dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a token, all payloads together."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in self.payloads)

    @property
    def layout(self) -> DeviceLayout:
        """With room for nothing more than this."""
        capacity = Capacity(
            max_tokens_per_rank=self.case.max_tokens,
            max_bytes_per_token=max(self.row_bytes, self.hidden * self.sent_dtype.itemsize),
            num_topk=self.case.num_topk,
        )
        settings = Settings(slice_bytes=self.slice_bytes, ring_depth=self.ring_depth, wire_dtype=self.wire_dtype)
        return DeviceLayout(self.topology, capacity, settings)

    def rows(self, what: str, rank: int) -> list[torch.Tensor]:
        """Each payload of a rank."""
        num_tokens = self.case.num_tokens(rank)
        return [
            any_bits((num_tokens, *shape), dtype, self.seed, what, p, rank)
            for p, (dtype, shape) in enumerate(self.payloads)
        ]


class Outcome(NamedTuple):
    """What one rank has of it all; bytes are those that it sent to other nodes while dispatching."""

    plan: InternodePlan
    moved: dict[str, list[torch.Tensor]]
    sums: list[torch.Tensor]
    row_bytes: int
    metadata_bytes: int


class Play:
    """All verbs on all ranks, none of which is waited for, and what must come of them."""

    def __init__(self, scene: Scene) -> None:
        self.scene, case, self._ranks = scene, scene.case, scene.law.ranks
        self.x = {what: [scene.rows(what, rank) for rank in self._ranks] for what in ("x", "other x")}
        self.y = world_rows(scene.law, scene.hidden, scene.dtype, scene.seed)
        weights_dtype = torch.float64 if scene.dtype == torch.float64 else torch.float32
        self.weights = case.world_topk_weights(weights_dtype) if scene.is_weighted else None
        self.ids = [ids.to(torch.int32 if scene.seed % 3 else torch.int64) for ids in case.world_topk_idx]

    def run(self, order: int) -> list[Outcome]:
        """Everything, in an order that a number chooses."""
        return World(self.scene.layout, self.scene.placement, Machine(order)).run(self._on_rank)

    def _on_rank(self, at: Rank) -> Outcome:
        rank = at.rank
        output = at.dispatch(self._request(rank, self._payloads(at)))
        plan, rows = output.plan, output.rows
        sent = at.profile.internode_row_bytes, at.profile.internode_metadata_bytes
        others = [made_on(at, rows) for rows in self.x["other x"][rank]]
        moved = {"x": rows, "other x": at.dispatch_again(plan, others)}
        sums = []
        for is_weighted in self._weightings:
            y = made_on(at, self.y[rank])
            sums.append(at.combine(plan, y, is_weighted=is_weighted))
        return Outcome(plan, moved, sums, *sent)

    @property
    def _weightings(self) -> Sequence[bool]:
        return (True, False) if self.scene.is_weighted else (False,)

    def _request(self, rank: int, payloads: Sequence[torch.Tensor]) -> DispatchRequest:
        scene, weights = self.scene, self.weights
        laid_out = ID_LAYOUTS[scene.id_layout]
        return DispatchRequest(
            routing=Routing(laid_out(self.ids[rank]), None if weights is None else laid_out(weights[rank])),
            payloads=payloads,
            placement=scene.placement,
            balancer=scene.chosen_balancer,
            expert_alignment=scene.alignment,
            static=scene.static(rank),
            launch=Launch(),
        )

    def _payloads(self, at: Rank) -> list[torch.Tensor]:
        return [made_on(at, rows) for rows in self.x["x"][at.rank]]

    def check(self, outcomes: Sequence[Outcome]) -> None:
        """All outcomes against the law."""
        for rank, outcome in enumerate(outcomes):
            self._check_rows(rank, outcome)
            self._check_sums(rank, outcome.sums)
        scene = self.scene
        num_internode_rows = scene.law.num_internode_rows(scene.topology.rank_to_node)
        weight_bytes = 0 if self.weights is None else self.weights[0].element_size()
        metadata_bytes = routing_bytes_per_row(scene.case.num_topk, weight_bytes)
        if scene.static(0) and scene.num_nodes > 1:  # a row of every token for each other node
            num_internode_rows = sum(map(scene.case.num_tokens, self._ranks)) * (scene.num_nodes - 1)
        assert sum(outcome.row_bytes for outcome in outcomes) == num_internode_rows * scene.row_bytes
        assert sum(outcome.metadata_bytes for outcome in outcomes) == num_internode_rows * metadata_bytes

    def _check_rows(self, rank: int, outcome: Outcome) -> None:
        law, plan = self.scene.law, outcome.plan
        num_slots, is_masked = len(law.slots(rank)), law.rows_per_expert is not None
        assert plan.num_rows_per_expert.tolist() == law.counts(rank)
        assert plan.num_dropped_per_expert.tolist() == law.num_dropped(rank)
        assert plan.num_rows_needed.tolist() == [max(map(len, law.wanted(rank)), default=0) if is_masked else num_slots]
        on_host = plan.num_rows_per_expert_on_host
        # Static rows, of which no host waits for anything, have no counts there.
        assert (on_host is None) if self.scene.static(rank) else (on_host.tolist() == law.counts(rank))
        for what, outputs in outcome.moved.items():
            for p, output in enumerate(outputs):
                expected = law.rows(rank, [payloads[p] for payloads in self.x[what]])
                if is_masked:
                    assert output.shape[:2] == (len(law.counts(rank)), law.rows_per_expert)
                    output = output.flatten(0, 1)  # noqa: PLW2901  the same rows
                is_defined = ~law.undefined(rank)
                name = f"payload {p} of {what} on rank {rank}"
                assert_same_bits(output[:num_slots][is_defined], expected[is_defined], name)
        if self.weights is not None:
            expected = law.row_weights(rank, self.weights)
            assert_same_bits(plan.slot_weights[:num_slots], expected, f"weights by slot on rank {rank}")

    def _check_sums(self, rank: int, sums: Sequence[torch.Tensor]) -> None:
        scene, law = self.scene, self.scene.law
        for is_weighted, out in zip(self._weightings, sums, strict=True):
            assert out.dtype == scene.dtype
            # Partial sums travel within a node, and then between nodes.
            exact = law.sums(rank, self.y, self.weights if is_weighted else None, law.ranks)
            bound = law.error_bound(exact, scene.dtype, scene.sum_dtype, num_hops=2)
            if isinstance(scene.wire_dtype, Quantize):
                bound = (bound + _error_of_quantised_sums(exact.remote_size, scene.wire_dtype, scene.num_nodes)) * 1.01
            assert_within(out, exact.exact, bound, f"sums of rank {rank}")


def _error_of_quantised_sums(remote_size: torch.Tensor, quantize: Quantize, num_nodes: int) -> torch.Tensor:
    """Half of the last place of each code: of its value, or of the smallest one with the largest scale."""
    shape = len(remote_size), remote_size.shape[1] // quantize.columns, quantize.columns
    largest = remote_size.view(shape).amax(-1, keepdim=True).expand(shape).reshape(remote_size.shape)
    return remote_size / 16 + (num_nodes - 1) * 2 * largest / 448 * 2**-10


def made_on(at: Rank, values: torch.Tensor) -> torch.Tensor:
    """A tensor that the caller's stream fills when it comes to it."""
    made = torch.empty_like(values)
    at.stream.launch("making rows", lambda: made.copy_(values))
    return made


def play(scene: Scene, order: int) -> None:
    """Run a scene, and check it."""
    whole = Play(scene)
    whole.check(whole.run(order))
