"""What must move, by law: rows drawn without drawing tokens, for any number of ranks, and gates of published models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fusco.bench.inputs.traffic import Workload
from fusco.core.compiled import compiled
from fusco.core.lanes import IntArray
from fusco.core.topology import Topology
from fusco.simulate.demand import Demand

_MOST_DRAWN = 1 << 18  # tokens of all ranks that are drawn; a rank's other tokens are like those
_SKEWED_TOKENS = 0.5  # Beta(0.5, 0.5) of twice the mean: many ranks with few tokens, or with nearly twice the mean
_SKEWED_NODES = 8.0  # Gamma(8): popularity of nodes, standard deviation 35 % of the mean


def demand_of(workload: Workload) -> Demand:
    """Return what a workload moves. Of many tokens some are drawn, as the name says, and counts are multiplied."""
    topology, pattern = workload.topology, workload.pattern
    tokens = workload.tokens
    drawn = min(tokens, max(64, _MOST_DRAWN // topology.world_size)) if workload.batch is None else tokens
    factor = tokens / drawn
    if factor > 1:
        workload = replace(workload, tokens=drawn)
    routing = [workload.routing(rank).topk_idx for rank in range(topology.world_size)]
    name = pattern if workload.skew == 1 else f"{pattern} with exponent {workload.skew:g}"
    name += "" if factor == 1 else f", {drawn} of {tokens} tokens of a rank drawn"
    demand = Demand.of_routing(name, routing, workload.placement, topology, workload.bytes_per_token)
    demand = replace(demand, skew=workload.skew if pattern == "zipf" else None)
    return demand if factor == 1 else scaled(demand, factor)


def scaled(demand: Demand, factor: float) -> Demand:
    """Return a demand with as many times the rows, rounded."""

    def times(counts: IntArray) -> IntArray:
        return np.rint(counts * factor).astype(np.int64)

    return replace(
        demand,
        num_tokens=times(demand.num_tokens),
        node_rows=times(demand.node_rows),
        exact_rank_rows=None if demand.exact_rank_rows is None else times(demand.exact_rank_rows),
        exact_pair_rows=None if demand.exact_pair_rows is None else times(demand.exact_pair_rows),
        expert_rows=times(demand.expert_rows),
        _traffic={},
        _chosen={},
        _loads={},
    )


def drawn_demand(
    topology: Topology, tokens: int, num_topk: int, bytes_per_row: int, *, seed: int = 0, is_skewed: bool
) -> Demand:
    """Draw rows by rank and node, for any number of ranks.

    Even: every rank has ``tokens``, every expert is as popular. Skewed: ranks have Beta(0.5, 0.5) of twice as many, and
    nodes a popularity of Gamma(8); ``tokens`` is the mean.
    """
    random, num_nodes = np.random.default_rng(seed), topology.num_nodes
    num_tokens = np.full(topology.world_size, tokens)
    popularity = np.ones(num_nodes)
    if is_skewed:
        num_tokens = np.rint(2 * tokens * random.beta(_SKEWED_TOKENS, _SKEWED_TOKENS, len(num_tokens))).astype(np.int64)
        popularity = random.gamma(_SKEWED_NODES, size=num_nodes)
    popularity = popularity / popularity.sum()
    is_needed = 1 - (1 - popularity) ** num_topk
    by_rank = topology.ranks_per_node * (1 - (1 - popularity / topology.ranks_per_node) ** num_topk)
    rows = random.binomial(num_tokens[:, None], is_needed)
    nothing = np.zeros(0, np.int64)
    return Demand(
        name="skewed: tokens Beta(0.5, 0.5), nodes Gamma(8)" if is_skewed else "uniform, by law",
        topology=topology,
        bytes_per_row=bytes_per_row,
        num_tokens=num_tokens,
        node_rows=rows,
        rank_copies=float(by_rank.sum() / is_needed.sum()),
        expert_copies=float(num_topk / is_needed.sum()),
        expert_rows=nothing,
        expert_to_rank=nothing,
    )


def grouped_gate(
    topology: Topology, tokens: int, num_experts: int, num_topk: int, groups_of_token: int, seed: int = 0
) -> list[torch.Tensor]:
    """Draw the experts of a gate that limits nodes: the best of ``groups_of_token`` groups, a group a node.

    DeepSeek-V3's (arXiv 2412.19437, section 2.1.2): a group counts with its two highest scores. Scores are uniform.
    ``groups_of_token`` 1 is FUSCO's single-node traffic. Returns int64 (tokens, num_topk) for each rank.
    """
    draws = np.random.default_rng(seed).integers(0, 1 << 62, topology.world_size)
    shape = (topology.num_nodes, num_experts // topology.num_nodes)
    chosen = np.arange(tokens) if groups_of_token else np.arange(0)
    return [
        torch.from_numpy(_draw_gate(int(seed_of_rank), len(chosen), shape[0], shape[1], num_topk, groups_of_token))
        for seed_of_rank in draws
    ]


def imbalanced(
    topology: Topology, tokens: int, num_experts: int, num_topk: int, remote_share: IntArray | Any, seed: int = 0
) -> list[torch.Tensor]:
    """Draw experts so that tokens have all on this node or all on others: ``remote_share[r]`` of rank ``r``'s."""
    num_nodes = topology.num_nodes
    draws = np.random.default_rng(seed).integers(0, 1 << 62, topology.world_size)
    return [
        torch.from_numpy(
            _draw_imbalanced(
                int(draws[rank]), tokens, node, num_nodes, num_experts // num_nodes, num_topk, float(remote_share[rank])
            )
        )
        for rank, node in enumerate(topology.rank_to_node)
    ]


@compiled()
def _draw_gate(seed: int, tokens: int, groups: int, of_group: int, num_topk: int, groups_of_token: int) -> Any:
    np.random.seed(seed % 4294967295)  # noqa: NPY002  numba's own generator
    ids = np.empty((tokens, num_topk), np.int64)
    scores, of_groups = np.empty(groups * of_group), np.empty(groups)
    for token in range(tokens):
        for expert in range(groups * of_group):
            scores[expert] = np.random.random()  # noqa: NPY002
        for group in range(groups):
            best, second = -1.0, -1.0
            for expert in range(group * of_group, (group + 1) * of_group):
                if scores[expert] > best:
                    best, second = scores[expert], best
                elif scores[expert] > second:
                    second = scores[expert]
            of_groups[group] = best + second
        for _ in range(groups - groups_of_token):
            worst = of_groups.argmin()
            of_groups[worst] = np.inf
            scores[worst * of_group : (worst + 1) * of_group] = -1.0
        for k in range(num_topk):
            ids[token, k] = scores.argmax()
            scores[ids[token, k]] = -1.0
    return ids


@compiled()
def _draw_imbalanced(
    seed: int, tokens: int, node: int, num_nodes: int, of_node: int, num_topk: int, remote_share: float
) -> Any:
    np.random.seed(seed % 4294967295)  # noqa: NPY002  numba's own generator
    ids = np.empty((tokens, num_topk), np.int64)
    first = node * of_node
    for token in range(tokens):
        is_remote = np.random.random() < remote_share  # noqa: NPY002
        k = 0
        while k < num_topk:
            if is_remote:
                expert = np.random.randint(0, (num_nodes - 1) * of_node)  # noqa: NPY002
                expert += of_node if expert >= first else 0
            else:
                expert = first + np.random.randint(0, of_node)  # noqa: NPY002
            is_new = True
            for other in range(k):
                is_new = is_new and ids[token, other] != expert
            if is_new:
                ids[token, k] = expert
                k += 1
    return ids
