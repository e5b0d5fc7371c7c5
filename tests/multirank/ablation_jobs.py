"""Functions on ranks: the benchmark's baseline and ablation, compared with the specification."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from rank_setup import Setup

import fusco
from comparison import assert_same_bits, assert_within, world_rows
from fusco.bench.inputs.traffic import Workload
from fusco.bench.shuffle.baseline import BaselineShuffle
from fusco.bench.shuffle.no_engine import NoEngineShuffle, expand, sum_copies
from fusco.bench.shuffle.summary import internode_rows
from fusco.planner.balancer import find_balancer
from fusco.planner.routing import Routing
from generator import KINDS, Case, any_bits, random_of
from law import Law

HIDDEN = 3


@dataclasses.dataclass(frozen=True)
class OneNodeCase:
    """``Case`` whose tokens have all their experts on one node, with nodes in turn."""

    case: Case
    num_nodes: int

    def __getattr__(self, name):
        return getattr(self.case, name)

    def topk_idx(self, rank):
        per_node = self.num_experts // self.num_nodes
        ids = torch.rand(self.num_tokens(rank), per_node, generator=random_of(self.seed, "ids", rank)).argsort(1)
        node = torch.arange(len(ids)) % self.num_nodes
        return ids[:, : self.num_topk] + node[:, None] * per_node

    @property
    def world_topk_idx(self):
        return [self.topk_idx(rank) for rank in range(self.world_size)]


def cases_of(setup: Setup, world_size: int):
    for seed, kind in enumerate(KINDS):
        yield setup.case(kind, seed, world_size)
    num_nodes = world_size // setup.ranks_per_node
    yield OneNodeCase(setup.case("ragged", 50, world_size, num_topk=4), num_nodes)


def check_no_engine(group: dist.ProcessGroup, setup: Setup) -> None:
    """Dispatch and combine every kind; the bytes counted between nodes are those that the specification requires."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    topology = fusco.Topology.of_equal_nodes(world_size, setup.ranks_per_node)
    placement = fusco.ExpertPlacement.of(setup.num_experts, setup.expert_placement, world_size)
    shuffle = NoEngineShuffle(group, placement, topology, find_balancer(setup.balancer))
    for case in cases_of(setup, world_size):
        law = Law(case.world_topk_idx, placement.expert_to_rank)

        def dispatch(x, case=case):
            return shuffle.dispatch(x, case.topk_idx(rank), case.topk_weights(rank))

        sent_bytes = check_variant(rank, law, case, dispatch, shuffle.combine, lambda: shuffle.profile)
        per_rank = [None] * world_size
        dist.all_gather_object(per_rank, sent_bytes, group=group)
        required_bytes = law.num_internode_rows(topology.rank_to_node) * HIDDEN * 4
        assert [sum(sent) for sent in zip(*per_rank, strict=True)] == [required_bytes, required_bytes]


def check_baseline(group: dist.ProcessGroup, setup: Setup) -> None:
    """Dispatch and combine every kind; each of a token's experts on another node gets a copy."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    topology = fusco.Topology.of_equal_nodes(world_size, setup.ranks_per_node)
    placement = fusco.ExpertPlacement.of(setup.num_experts, setup.expert_placement, world_size)
    shuffle = BaselineShuffle(group, placement, topology)
    to_node = torch.tensor([*(topology.rank_to_node[owner] for owner in placement.expert_to_rank), -1])
    for case in cases_of(setup, world_size):
        law = Law(case.world_topk_idx, placement.expert_to_rank)

        def dispatch(x, case=case):
            return shuffle.dispatch(x, case.topk_idx(rank), case.topk_weights(rank))

        dispatched, _ = check_variant(rank, law, case, dispatch, shuffle.combine, lambda: shuffle.profile)
        nodes = to_node[case.topk_idx(rank).long()]
        num_leaving = int(((nodes >= 0) & (nodes != topology.rank_to_node[rank])).sum())
        assert dispatched == num_leaving * HIDDEN * 4


def check_no_planner(group: dist.ProcessGroup, setup: Setup) -> None:
    """``check_no_engine`` with a communicator that gets one token for each (token, rank)."""
    roomy = dataclasses.replace(setup, max_tokens=setup.max_tokens * dist.get_world_size(group))
    with roomy.open(group) as comm:
        for case in cases_of(setup, comm.topology.world_size):
            law = Law(case.world_topk_idx, comm.placement.expert_to_rank)
            expanded = expand(Routing(case.topk_idx(comm.rank), case.topk_weights(comm.rank)), comm.placement)

            def dispatch(x, expanded=expanded):
                routing = expanded.routing
                sent = comm.dispatch(x[expanded.copy_to_token], routing.topk_idx, routing.topk_weights)
                return sent.rows, sent.num_rows_per_expert.tolist(), sent.handle

            def combine(y, handle, case=case, expanded=expanded):
                return sum_copies(comm.combine(y, handle), expanded.copy_to_token, case.num_tokens(comm.rank))

            check_variant(comm.rank, law, case, dispatch, combine, lambda: comm.profile)


def check_variant(rank, law, case, dispatch, combine, profile) -> tuple[int, int]:
    """Run one dispatch and combine; return the bytes of rows that this rank sent to other nodes in each."""
    x = [any_bits((case.num_tokens(src), HIDDEN), torch.float32, case.seed, "x", src) for src in law.ranks]
    rows, counts, handle = dispatch(x[rank])
    dispatched = profile().internode_row_bytes
    assert_same_bits(rows, law.rows(rank, x), f"{case}: dispatch")
    assert counts == law.counts(rank)
    y = world_rows(law, HIDDEN, torch.float32, case.seed)
    out = combine(y[rank], handle)
    sums = law.sums(rank, y, case.world_topk_weights(), law.ranks)
    assert_within(out, sums.exact, law.error_bound(sums, out.dtype, None), f"{case}: combine")
    return dispatched, profile().internode_row_bytes


def differ_from_plan(group: dist.ProcessGroup, workload: Workload, balancer: str) -> list[int]:
    """Bytes that this rank's dispatch and combine send between nodes, minus those computed from all ranks' routing."""
    rank = dist.get_rank(group)
    routing = workload.routing(rank)
    shuffle = NoEngineShuffle(group, workload.placement, workload.topology, fusco.BALANCERS[balancer])
    rows, _, handle = shuffle.dispatch(workload.rows(rank), routing.topk_idx, routing.topk_weights)
    dispatched = shuffle.profile.internode_row_bytes
    shuffle.combine(rows, handle)
    row_bytes = internode_rows("no-engine", workload, balancer) * workload.bytes_per_token
    return [
        dispatched - int(row_bytes[rank].sum()),
        shuffle.profile.internode_row_bytes - int(row_bytes[:, rank].sum()),
    ]
