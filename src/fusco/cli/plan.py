"""``fusco plan``: the traffic, links and loads of one plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from fusco.bench import names
from fusco.cli import options
from fusco.cli.option_groups import with_groups
from fusco.cli.running import new_console
from fusco.cli.tables import new_table

if TYPE_CHECKING:
    from fusco.bench.explain import PlanRecord


@with_groups
def plan(
    *,
    nodes: options.Nodes = 2,
    ranks_per_node: options.RanksPerNode = 4,
    traffic: options.Pattern = names.Pattern.IMBALANCED,
    workload: options.WorkloadOptions,
    balancer: options.Balancer = options.BalancerName.LANES,
    json: options.JsonFile = None,
) -> None:
    """Explain one plan: traffic between nodes, ranks with and without lanes, balancers, duplicates avoided, memory.

    Pure computation: nothing is sent, and no other process is started.
    """
    from fusco.bench.explain import explain
    from fusco.bench.json_lines import write_json_lines
    from fusco.core.topology import Topology

    topology = Topology.of_equal_nodes(nodes * ranks_per_node, ranks_per_node)
    (planned,) = workload.workloads([traffic], topology)
    record = explain(planned, balancer.value)
    _print(record, new_console(json))
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

    columns = ["rank", "node", "sends", "receives", "plain: sends", "receives"]
    ranks = new_table(f"rows between nodes, by rank: '{record.balancer}', and plain with equal local ranks", columns)
    for rank in record.ranks:
        numbers = (rank.rank, rank.node, rank.sends, rank.receives, rank.plain_sends, rank.plain_receives)
        ranks.add_row(*(f"{number:,}" for number in numbers))
    console.print(ranks)

    title = f"busiest rank over the bound, {record.bound_rows:,.1f} rows: the busiest node's share for each rank"
    loads = new_table(title, ("balancer", "sends", "receives", "rows moved within nodes"), left=("balancer",))
    for name, balance in record.balance.items():
        chosen = " (chosen)" if name == record.balancer else ""
        ratios = (f"{balance.send_ratio:.3f}", f"{balance.receive_ratio:.3f}")
        loads.add_row(name + chosen, *ratios, f"{balance.moved_rows:,}")
    console.print(loads)

    sent, avoided = record.internode_bytes, record.internode_bytes_avoided
    share = f" ({avoided / (sent + avoided):.0%} of what a copy for each expert would send)" if avoided else ""
    console.print(f"between nodes: {sent / 1e6:,.2f} MB of rows; duplicates avoided: {avoided / 1e6:,.2f} MB{share}")
    console.print(
        f"within nodes: {record.intranode_bytes / 1e6:,.2f} MB pulled from other ranks' pools, each row once; "
        f"{record.lane_bytes / 1e6:,.2f} MB read to send them for other ranks"
    )
    console.print(f"metadata between nodes: {record.metadata_bytes / 1e6:,.2f} MB")
    console.print(
        f"memory of each rank: {record.shared_memory_bytes / 2**20:,.1f} MiB shared, "
        f"{record.private_memory_bytes / 2**20:,.1f} MiB private, outputs apart"
    )
