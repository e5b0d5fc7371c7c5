"""Dispatches, records and simulations that pages of tests show."""

from __future__ import annotations

import numpy as np
import torch

from fusco.cli.explore.stages import stage_views
from fusco.cli.explore.traffic import Dispatch, copies_view, experts_view, links_view, matrix_view
from fusco.cli.explore.views import Page
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.placement import Balance
from fusco.planner.traffic import Traffic
from fusco.schedule import Links

BYTES_PER_ROW = 8192


def drawn_dispatch(nodes, ranks_per_node, tokens=64, seed=0):
    """A dispatch of routing in which half of the ranks have few tokens, and low experts are popular."""
    topology = Topology.of_equal_nodes(nodes * ranks_per_node, ranks_per_node)
    placement = ExpertPlacement.contiguous(2 * topology.world_size, topology.world_size)
    random = np.random.default_rng(seed)
    popularity = 1.0 / (4 + np.arange(placement.num_experts))
    ids = []
    for rank in range(topology.world_size):
        keys = random.random((tokens if rank % 2 else tokens // 8, placement.num_experts)) ** (1 / popularity)
        ids.append(torch.from_numpy(np.argsort(-keys, axis=1)[:, :4].copy()))
    return Dispatch.of_routings(ids, placement, topology, BYTES_PER_ROW), ids, placement


def large_dispatch(nodes, ranks_per_node, seed=0):
    """A dispatch of random counts, which need no routing of thousands of ranks."""
    topology = Topology.of_equal_nodes(nodes * ranks_per_node, ranks_per_node)
    random = np.random.default_rng(seed)
    loads = random.beta(0.5, 0.5, (nodes, ranks_per_node, 1)) * random.gamma(8, 1 / 8, nodes)
    rows = np.rint(4096 * 8 / nodes * loads).astype(np.int64)
    rows[np.arange(nodes), :, np.arange(nodes)] = 0
    copies = (rows * 1.5).astype(np.int64).reshape(nodes * ranks_per_node, nodes)
    return Dispatch(Traffic(topology, rows), copies, 4096 * nodes * ranks_per_node, BYTES_PER_ROW)


def plan_page(dispatch, layers, placement):
    """A page of a plan; ``layers`` has the rows of each expert of each layer."""
    topology = dispatch.topology
    views = [copies_view(dispatch), links_view(dispatch, "lanes"), matrix_view(dispatch, "lanes")]
    sizes = (topology.world_size, Balance(2), range(len(layers)), topology.ranks_per_node)
    views.append(experts_view(layers, placement, *sizes))
    views += stage_views(dispatch.node_rows * BYTES_PER_ROW, topology.ranks_per_node, Links())
    facts = {"ranks": str(topology.world_size)}
    return Page(title="A plan", subtitle="Drawn </script> & <b>", facts=facts, views=views, origin="A test.")


def page_of(nodes, ranks_per_node, num_layers=3):
    """A page of a plan of any size: of routing up to 64 ranks, of counts above."""
    ranks = nodes * ranks_per_node
    placement = ExpertPlacement.contiguous(2 * ranks, ranks)
    dispatch = drawn_dispatch(nodes, ranks_per_node)[0] if ranks <= 64 else large_dispatch(nodes, ranks_per_node)
    random = np.random.default_rng(1)
    layers = [random.integers(1, 1000, placement.num_experts) for _ in range(num_layers)]
    return plan_page(dispatch, layers, placement)


def variant(name, dispatch_ms, combine_ms, **more):
    """A line of ``fusco bench shuffle --json``, of the fields that are shown."""
    record = {"variant": name, "traffic": "trace", "nodes": 2, "ranks_per_node": 2, "batch": 0, "tokens": 1024}
    record |= {"all_tokens": 4096, "verified": True, "num_iterations": 20, "hardware": {"cpu": "AMD EPYC"}}
    record |= {"dispatch_ms": dispatch_ms, "combine_ms": combine_ms, "bound_ms": 0.0}
    return record | {"internode_row_bytes": 3000, "internode_row_bytes_lower_bound": 2000} | more


def simulation(system="fusco", call="dispatch", makespan_ms=2.0, **more):
    """A line of ``fusco simulate --json``, of 2 nodes of 2 ranks."""
    links = [
        {"name": f"{kind} of rank {rank}", "kind": kind, "rank": rank, "node": rank // 2, "capacity_gbs": 45.0}
        for rank in range(4)
        for kind in ("nic-out", "nic-in")
    ]
    loads = {"send_bytes": [60, 20, 40, 40], "receive_bytes": [40, 40, 40, 40]}
    spans = [
        {"rank": rank, "name": name, "start_ms": 0.1 + begin, "end_ms": 1.0 + begin + rank / 10}
        for rank in range(4)
        for begin, name in enumerate(("pack", "between nodes"))
    ]
    result = {"kind": "simulation", "title": "", "cluster": "two", "system": system, "tier": "fluid", "call": call}
    result |= {"traffic": "trace", "ranks": 4, "nodes": 2, "ranks_per_node": 2, "tokens": 40, "bytes_per_row": 2}
    result |= {"makespan_ms": makespan_ms, "bound_ms": 1.5, "binds": "nic-out of rank 0", "links": links}
    result |= {"spans": spans, "node_bytes_before": [[8, 120], [120, 8]], "node_bytes_after": [[8, 80], [80, 8]]}
    result |= {"expert_rows": [30, 10, 20, 20], "expert_rows_by_rank": [30, 10, 20, 20], "nic_bound_bytes": 40}
    result |= {
        "balancers": {
            "static": {**loads, "over_bound": 1.5},
            "lanes": {"send_bytes": [40] * 4, "receive_bytes": [40] * 4, "over_bound": 1.0},
        },
        "copies": {"needed": 120, "sent": 80, "bound": 80},
        "samples": {
            "step_ms": 0.5,
            "links": [link["name"] for link in links],
            "gbs": [[10.0 * i + j for j in range(len(links))] for i in range(4)],
        },
        "constants": [
            {"name": "nic_gbs", "value": 45.0, "source": "400 Gbit/s less headers", "trained": []},
            {"name": "start_us", "value": 40.0, "source": "1024 tokens", "trained": ["h200x4 1024"]},
        ],
    }
    return result | more
