"""Programs of systems: bytes are the planner's, what binds is right, exports and clusters are read back."""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from export_readers import read_chakra, read_goal, read_htsim
from hypothesis import given, settings, strategies as st

from fusco.bench.explain import plan_cost, plan_world
from fusco.bench.simulation.laws import drawn_demand
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.planner.balancer import BALANCERS
from fusco.planner.routing import Routing
from fusco.schedule import lower_bound_bytes
from fusco.simulate.advice import defaults_used, describe_binding, gain_of_replicas, gains_of_parts
from fusco.simulate.cluster import Cluster, Constant, Fabric, load_cluster, names_of_clusters, write_cluster
from fusco.simulate.demand import Demand
from fusco.simulate.exchanges import links_of
from fusco.simulate.export import check_export, messages_of, write_export
from fusco.simulate.run import simulate
from fusco.simulate.systems import SYSTEMS

ROW = 1000


def cluster_of(nodes=2, local=2, fabric=None, **values) -> Cluster:
    """No latencies, 1 GB/s between nodes, 10 GB/s within, unless ``values`` say otherwise."""
    rates = {"nic_gbs": 1.0, "nvl_gbs": 10.0, "memory_gbs": 100.0, "slice_mb": 0.01}
    figures = {**rates, **dict.fromkeys(("start_us", "latency_us", "stage_us"), 0.0), **values}
    constants = {name: Constant(value=value) for name, value in figures.items()}
    return Cluster(name="test", nodes=nodes, ranks_per_node=local, constants=constants, fabric=fabric or Fabric())


def routing_of(topology, num_experts=8, num_topk=3, seed=0, most=60):
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(most, (topology.world_size,), generator=random).tolist()
    return [torch.rand(n, num_experts, generator=random).topk(num_topk, dim=1).indices for n in tokens]


def demand_of(topology, **options) -> Demand:
    ids = routing_of(topology, **options)
    placement = ExpertPlacement.contiguous(options.get("num_experts", 8), topology.world_size)
    return Demand.of_routing("random", ids, placement, topology, ROW)


def sum_of(result, kind):
    return sum(link.bytes for link in result.links if link.kind == kind)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 1000), st.sampled_from([(2, 2), (4, 2), (2, 4)]), st.sampled_from(["lanes", "static", "rotation"])
)
def test_bytes_between_nodes_are_the_planners(seed, shape, balancer):
    topology = Topology.of_equal_nodes(shape[0] * shape[1], shape[1])
    ids, placement = routing_of(topology, seed=seed), ExpertPlacement.contiguous(8, topology.world_size)
    plans = plan_world([Routing(each) for each in ids], placement, topology, BALANCERS[balancer])
    costs = [plan_cost(plan, ROW) for plan in plans]
    name = {"lanes": "fusco", "static": "no-balancer", "rotation": "rotation"}[balancer]
    demand = Demand.of_routing("random", ids, placement, topology, ROW)
    for call in ("dispatch", "combine"):
        for tier in ("bound", "fluid", "slices"):
            result = simulate(cluster_of(*shape), demand, name, call, tier)
            assert sum_of(result, "nic-out") == sum_of(result, "nic-in") == sum(c.internode_send_bytes for c in costs)
    assert (result.copies.needed - result.copies.bound) * ROW == sum(c.internode_bytes_avoided for c in costs)


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_every_system_takes_at_least_as_long_as_its_busiest_link(name, call):
    demand = demand_of(Topology.of_equal_nodes(4, 2))
    for tier in ("bound", "fluid", "slices"):
        result = simulate(cluster_of(), demand, name, call, tier)
        assert result.makespan_ms >= result.bound_ms * (1 - 1e-9) > 0
        assert max(link.busy_share for link in result.links) <= 1 + 1e-9
        assert json.loads(json.dumps(asdict(result)))["system"] == name
    assert {span.rank for span in result.spans} <= set(range(4))  # a rank without tokens may send nothing


def test_one_row_to_another_node_takes_its_bytes_and_latencies():
    topology, placement = Topology.of_equal_nodes(2, 1), ExpertPlacement.contiguous(2, 2)
    ids = [torch.tensor([[1]]), torch.zeros((0, 1), dtype=torch.int64)]
    demand = Demand.of_routing("one", ids, placement, topology, 5000)
    cluster = cluster_of(2, 1, start_us=7.0)
    assert simulate(cluster, demand, "fusco").makespan_ms == pytest.approx(0.012)  # 7 us, 5000 bytes at 1 GB/s
    assert simulate(cluster, demand, "fusco").binds in ("nic-out of rank 0", "nic-in of rank 1")


@pytest.mark.parametrize("seed", range(5))
def test_stages_are_never_faster_than_their_lower_bound(seed):
    topology = Topology.of_equal_nodes(8, 2)
    matrix = np.random.default_rng(seed).integers(0, 10**6, (8, 8))
    node_bytes = matrix.reshape(4, 2, 4, 2).sum(axis=(1, 3))
    cluster = cluster_of(4, 2)
    took = simulate(cluster, Demand.of_matrix("random", matrix, topology), "fast").makespan_ms
    assert took >= links_of(cluster).internode_us(lower_bound_bytes(node_bytes) / 2) / 1e3 * (1 - 1e-9)


def test_slices_fill_and_drain_the_pipeline():
    demand = demand_of(Topology.of_equal_nodes(4, 2), most=600)
    times = {tier: simulate(cluster_of(nvl_gbs=2.0), demand, tier=tier).makespan_ms for tier in ("fluid", "slices")}
    assert times["fluid"] < times["slices"] < 1.2 * times["fluid"]


def test_rails_that_are_not_connected_are_crossed_within_the_node():
    demand = demand_of(Topology.of_equal_nodes(4, 2))
    plain = simulate(cluster_of(), demand, "direct")
    rails = simulate(cluster_of(fabric=Fabric(kind="rails", oversubscription=math.inf)), demand, "direct")
    assert sum_of(rails, "nvl-out") > sum_of(plain, "nvl-out")
    assert sum_of(rails, "nic-out") == sum_of(plain, "nic-out")


@pytest.mark.parametrize("kind", ["rails", "leaves"])
def test_oversubscribed_switches_bind(kind):
    demand = demand_of(Topology.of_equal_nodes(8, 2))
    fabric = Fabric(kind=kind, oversubscription=8.0, nodes_per_leaf=2)
    result = simulate(cluster_of(4, 2, fabric=fabric), demand, "direct")
    assert result.binds.startswith({"rails": "rail-", "leaves": "leaf-"}[kind])
    assert result.makespan_ms > simulate(cluster_of(4, 2), demand, "direct").makespan_ms


def test_a_faster_nic_takes_a_larger_share():
    demand = demand_of(Topology.of_equal_nodes(4, 2), most=3000)
    plain = cluster_of()
    unequal = Cluster(name="unequal", nodes=2, ranks_per_node=2, constants=plain.constants, nic_shares=(3, 1))
    with_lanes, without = (simulate(unequal, demand, name).makespan_ms for name in ("fusco", "no-lanes"))
    assert with_lanes < 0.8 * without


@pytest.mark.parametrize("tier", ["bound", "fluid", "slices"])
def test_cores_of_a_machine_move_the_rows_of_all_its_nodes(tier):
    """Where nothing else binds, each byte that is sent, distributed or summed takes its time of the cores."""
    demand = demand_of(Topology.of_equal_nodes(4, 2))
    free = cluster_of(nic_gbs=1e6, nvl_gbs=1e6, memory_gbs=1e6)
    slow = replace(free.with_values("slow", core_gbs=1.0), machines=1)
    remote, pairs, by_rank = (
        int(rows) * ROW / 1e6 for rows in (demand.remote_rows, demand.pair_rows.sum(), demand.rank_rows.sum())
    )
    for call, passes in (("dispatch", remote + pairs), ("combine", remote + pairs + by_rank)):
        result = simulate(slow, demand, "fusco", call, tier)
        assert result.makespan_ms == pytest.approx(passes, rel=1e-3)
        assert describe_binding(result).startswith("cores of machine 0 (processors), busy for")
        of_two = simulate(replace(slow, machines=0), demand, "fusco", call, tier).makespan_ms
        assert passes / 2 <= of_two * 1.001 < passes
        assert simulate(free, demand, "fusco", call, tier).makespan_ms < passes / 100
    copied = slow.with_values("slow", memory_gbs=0.001)  # a rank's own rows, before all else or after it
    assert simulate(copied, demand, "fusco", "combine", tier).makespan_ms == pytest.approx(
        passes + 1e3 * demand.num_tokens.max() * ROW / 1e6, rel=0.01
    )


def test_tiers_refuse_what_they_cannot_answer():
    demand = drawn_demand(Topology.of_equal_nodes(10_080, 72), 4096, 8, 14336, is_skewed=True)
    cluster = load_cluster("gb200-nvl72").resized(140)
    with pytest.raises(ValueError, match="too many for tier fluid, at most 600,000: tier bound answers"):
        simulate(cluster, demand)
    with pytest.raises(ValueError, match="test has 2 x 2 ranks, the traffic 140 x 72"):
        simulate(cluster_of(), demand)
    with pytest.raises(ValueError, match="system 'none' is not one of fusco"):
        simulate(cluster, demand, "none")
    start = time.process_time()
    result = simulate(cluster, demand, "no-lanes", tier="bound")
    assert time.process_time() - start < 10  # 2 s where nothing else runs
    assert result.ranks == 10_080


@pytest.mark.parametrize("name", ["fusco", "no-lanes", "no-balancer", "deepep"])
@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_links_of_very_many_flows_have_the_bytes_of_each(name, call, monkeypatch):
    demand = drawn_demand(Topology.of_equal_nodes(48, 4), 500, 8, ROW, is_skewed=True)
    cluster = cluster_of(12, 4)
    one_by_one = simulate(cluster, demand, name, call, "bound")
    monkeypatch.setattr("fusco.simulate.forwarding.MOST_FLOWS", 100)
    merged = simulate(cluster, demand, name, call, "bound")
    assert {link.name: link.bytes for link in merged.links} == {link.name: link.bytes for link in one_by_one.links}
    assert merged.makespan_ms == one_by_one.makespan_ms
    program = SYSTEMS[name].build(demand, cluster, call)
    assert program.num_flows > max(hop.stands_for for hop in program.hops) > 12 * 4 * 10
    with pytest.raises(ValueError, match="messages are too many to write"):
        messages_of(program, 48)


def test_ten_thousand_ranks_in_nodes_of_eight_are_answered_in_seconds():
    demand = drawn_demand(Topology.of_equal_nodes(10_080, 8), 4096, 8, 14336, is_skewed=True)
    cluster = load_cluster("h100x8").resized(1260)
    simulate(cluster_of(), demand_of(Topology.of_equal_nodes(4, 2)), tier="bound")  # compile
    start = time.process_time()
    result = simulate(cluster, demand, tier="bound")
    assert time.process_time() - start < 2  # 0.5 s where nothing else runs
    assert result.balancers["lanes"].over_bound < 1.02
    with pytest.raises(ValueError, match=r"1[0-9],[0-9,]* flows are too many for tier slices, .*: tier bound answers"):
        simulate(cluster, demand, tier="slices")


@pytest.mark.parametrize("suffix", [".goal", ".cm", ".et"])
@pytest.mark.parametrize("name", ["fusco", "fast", "nccl"])
def test_exports_are_read_back(tmp_path, suffix, name):
    topology = Topology.of_equal_nodes(4, 2)
    demand, cluster, path = demand_of(topology), cluster_of(), tmp_path / f"plan{suffix}"
    write_export(messages_of(SYSTEMS[name].build(demand, cluster, "dispatch"), 4), path)
    matrix = {".goal": read_goal, ".cm": read_htsim, ".et": lambda each: read_chakra(each, 4)}[suffix](path)
    nodes = np.array(topology.rank_to_node)
    between = matrix[nodes[:, None] != nodes].sum()
    rows = demand.remote_rows if name == "fusco" else demand.remote_pairs
    assert between == rows * ROW
    if name == "fusco":
        plans = plan_world(
            [Routing(each) for each in routing_of(topology)],
            ExpertPlacement.contiguous(8, 4),
            topology,
            BALANCERS["lanes"],
        )
        assert between == sum(plan_cost(plan, ROW).internode_send_bytes for plan in plans)


def test_barriers_of_htsim_count_the_connections_that_end_them(tmp_path):
    matrix = 1000 * (1 - np.eye(4, dtype=np.int64))  # even: nothing is balanced before the first stage
    demand = Demand.of_matrix("even", matrix, Topology.of_equal_nodes(4, 2))
    write_export(messages_of(SYSTEMS["fast"].build(demand, cluster_of(), "dispatch"), 4), tmp_path / "even.cm")
    words = [line.split() for line in (tmp_path / "even.cm").read_text().splitlines()]
    counts = {int(line[2]): int(line[-1]) for line in words if line[0] == "trigger"}
    ended = Counter(int(line[-1]) for line in words if "send_done_trigger" in line)
    assert counts == ended
    assert {int(line[4]) for line in words if "->" in line[0] and line[3] == "trigger"} == set(counts)


def test_htsim_reads_no_connection_of_two_gib(tmp_path):
    demand = Demand.of_matrix("one", np.array([[0, 1 << 31], [0, 0]]), Topology.of_equal_nodes(2, 1))
    messages = messages_of(SYSTEMS["direct"].build(demand, cluster_of(2, 1), "dispatch"), 2)
    with pytest.raises(ValueError, match="below 2 GiB, this has one of 2,147,483,648 bytes"):
        write_export(messages, tmp_path / "large.cm")


def test_chakra_has_attributes_of_the_types_that_its_feeder_reads(tmp_path):
    demand = demand_of(Topology.of_equal_nodes(4, 2))
    write_export(messages_of(SYSTEMS["fusco"].build(demand, cluster_of(), "dispatch"), 4), tmp_path / "plan.et")
    content = (tmp_path / "plan.3.et").read_bytes()
    for name, field in {b"comm_size": 9, b"comm_src": 7, b"comm_dst": 7, b"comm_tag": 7}.items():
        values = re.findall(b"\n" + re.escape(bytes([len(name)]) + name) + b"(.)", content, re.DOTALL)
        assert set(values) == {bytes([field << 3])}  # the key of a varint in this field of AttributeProto
    assert len(values) == content.count(b"is_cpu_op\xd8\x01\x00")


def test_an_export_needs_a_known_suffix(tmp_path):
    with pytest.raises(ValueError, match=r"an export is a file \.goal, \.cm, \.et, got"):
        check_export(tmp_path / "plan.json")


@pytest.mark.parametrize("name", names_of_clusters())
def test_clusters_are_read_and_written(name, tmp_path):
    cluster = load_cluster(name)
    write_cluster(cluster, tmp_path / f"{name}.toml")
    assert load_cluster(str(tmp_path / f"{name}.toml")) == cluster
    assert all(each.source for each in cluster.constants.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cluster]\nnodes = 0\nranks_per_node = 1", "nodes must be"),
        ("[cluster]\nnodes = 1\nranks_per_node = 1\n[constants.nic_gbs]\nvalue = 0", "nic_gbs must be above 0, got 0"),
        ("[cluster]\nnodes = 1\nranks_per_node = 1\n[constants.speed]\nvalue = 1", "no constants speed"),
        ("[cluster]\nnodes = 1\nranks_per_node = 2\nnic_shares = [1]", "nic_shares must be 2 integers"),
        ("[cluster]\nnodes = 1\nranks_per_node = 2\n[fabric]\nkind = 'star'", "fabric must be flat, rails or leaves"),
        ("[clusters]\nnodes = 1", "no tables clusters"),
        ("nodes =", "Invalid value"),
        ("[cluster]\nnodes = 2", "wrong: cluster lacks ranks_per_node"),
        ("[cluster]\ngpus = 2", "no entries of cluster gpus; known are name, nodes"),
        ("constants = 1", "constants must be in a table, got 1"),
        ("[constants]\nnic_gbs = 45", r"constants.nic_gbs must be in a table, got 45"),
        ("[constants.nic_gbs]\nsource = 'x'", "constants.nic_gbs: value must be a number, got None"),
        ("[cluster]\nnodes = 1\nranks_per_node = 1\n[fabric]\noversubscription = 'two'", "must be a number, got 'two'"),
        ("[cluster]\nnodes = 1\nranks_per_node = 1\nmachines = 2", "2 machines for 1 nodes"),
    ],
)
def test_wrong_clusters_are_refused(tmp_path, text, message):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_cluster(str(path))


def test_parts_and_replicas_are_told():
    demand, cluster = demand_of(Topology.of_equal_nodes(4, 2), most=3000), cluster_of()
    gains = {each.part.partition(":")[0]: each for each in gains_of_parts(cluster, demand)}
    assert gains["deduplication"].gain > 1.1
    assert gains["lanes"].gain > 0.99
    assert 1.0 < gains["rails"].gain <= 2.0
    replicas = gain_of_replicas(cluster, demand, expert_bytes=10**6)
    assert replicas.busiest_over_mean <= replicas.busiest_over_mean_before


def test_parts_that_bounds_cannot_tell_are_left_out():
    demand = demand_of(Topology.of_equal_nodes(4, 2), most=3000)
    parts = [each.part for each in gains_of_parts(cluster_of(), demand, "bound")]
    assert [part.partition(":")[0] for part in parts] == [
        "deduplication",
        "no passes over memory, pipelined",
        "balancer of who forwards",
        "lanes",
        "rails",
    ]


def test_what_binds_is_told_with_its_share():
    demand = demand_of(Topology.of_equal_nodes(4, 2), most=3000)
    result = replace(simulate(cluster_of(), demand), binds="nic-in of rank 3", bound_ms=9.0, makespan_ms=10.0)
    assert describe_binding(result) == "nic-in of rank 3 (node 1, network, as receiver), busy for 90 % of the time"
    waiting = replace(result, makespan_ms=90.0)
    assert describe_binding(waiting).startswith("no link, but start, latencies and waiting; the busiest link, nic-in")
    assert describe_binding(waiting).endswith("needs 10 % of the time")
    assert "memory_gbs 1500" in defaults_used(
        simulate(Cluster(name="n", nodes=2, ranks_per_node=2, constants={}), demand)
    )
