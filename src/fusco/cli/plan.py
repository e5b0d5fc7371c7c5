"""``fusco plan``: the traffic, groups and loads of one plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from fusco.bench import names
from fusco.cli import options
from fusco.cli.running import new_console
from fusco.cli.tables import new_table

if TYPE_CHECKING:
    from fusco.bench.explain import PlanRecord


def plan(
    nodes: options.Nodes = 2,
    ranks_per_node: options.RanksPerNode = 4,
    tokens: options.Tokens = 1024,
    hidden: options.Hidden = 4096,
    num_experts: options.NumExperts = 128,
    num_topk: options.NumTopk = 8,
    dtype: options.Dtype = "bfloat16",
    traffic: options.Pattern = names.Pattern.IMBALANCED,
    trace: options.TraceFile = None,
    trace_key: options.TraceKey = None,
    layer: options.Layer = None,
    seed: options.Seed = 0,
    balancer: options.Balancer = options.BalancerName.SEND_AND_RECEIVE,
    json: options.JsonFile = None,
) -> None:
    """Explain one plan: traffic between nodes, communication groups, loads by balancer, duplicates avoided, memory.

    Pure computation: nothing is sent, and no other process is started.
    """
    from fusco.bench.explain import explain
    from fusco.bench.json_lines import write_json_lines

    (workload,) = options.WorkloadOptions(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        tokens=tokens,
        hidden=hidden,
        num_experts=num_experts,
        num_topk=num_topk,
        dtype=dtype,
        trace=trace,
        trace_key=trace_key,
        layer=layer,
        seed=seed,
    ).workloads([traffic])
    record = explain(workload, balancer.value)
    _print(record, new_console(json))
    if json:
        write_json_lines([record], json)


def _print(record: PlanRecord, console: Console) -> None:
    console.print(
        f"[bold]{record.traffic}[/] traffic: {record.nodes} nodes x {record.ranks_per_node} ranks, {record.tokens} "
        f"tokens a rank, top-{record.num_topk} of {record.num_experts} experts, {record.bytes_per_token} bytes a token"
    )
    columns = ["", *(f"node {node}" for node in range(record.nodes))]
    matrix = new_table("rows from node (down) to node (across), one copy for each token", columns)
    for node, row in enumerate(record.node_to_node_rows):
        matrix.add_row(f"node {node}", *(f"{count:,}" if count else "-" for count in row))
    console.print(matrix)

    ranks = new_table("rows between nodes, by rank", ("rank", "node", "group", "sends", "receives as forwarder"))
    for rank in record.ranks:
        received = f"{rank.receives:,}"
        ranks.add_row(str(rank.rank), str(rank.node), str(rank.group), f"{rank.sends:,}", received)
    console.print(ranks)

    title = f"communication groups by '{record.balancer}': one rank of each node"
    groups = new_table(title, ("group", "ranks", "load (rows)"), left=("ranks",))
    for group, (members, load) in enumerate(zip(record.groups, record.group_loads, strict=True)):
        groups.add_row(str(group), ", ".join(map(str, members)), f"{load:,}")
    console.print(groups)

    columns = ["balancer", "groups (what they send)", "ranks (what they receive)"]
    loads = new_table("largest load over mean load", columns, left=("balancer",))
    for name, balance in record.balance.items():
        chosen = " (chosen)" if name == record.balancer else ""
        loads.add_row(name + chosen, f"{balance.group_load_ratio:.3f}", f"{balance.receive_ratio:.3f}")
    console.print(loads)

    sent, avoided = record.internode_bytes, record.internode_bytes_avoided
    share = f" ({avoided / (sent + avoided):.0%} of what a copy for each expert would send)" if avoided else ""
    console.print(f"between nodes: {sent / 1e6:,.2f} MB of rows; duplicates avoided: {avoided / 1e6:,.2f} MB{share}")
    console.print(f"within nodes: {record.intranode_bytes / 1e6:,.2f} MB pulled from other ranks' pools, each row once")
    console.print(f"metadata between nodes: {record.metadata_bytes / 1e6:,.2f} MB")
    console.print(
        f"memory of each rank: {record.shared_memory_bytes / 2**20:,.1f} MiB shared, "
        f"{record.private_memory_bytes / 2**20:,.1f} MiB private, outputs apart"
    )
