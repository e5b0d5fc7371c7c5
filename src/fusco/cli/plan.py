"""``fusco plan``: the traffic, links and loads of one plan, of a dispatch or of a shuffle of segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fusco.bench import names
from fusco.bench.harness.json_lines import write_json_lines
from fusco.cli import options
from fusco.cli.running import new_console
from fusco.cli.tables import ResultTable, conclusion, shape_of
from fusco.core.topology import Topology

if TYPE_CHECKING:
    from fusco.bench.balance import BalancedBatch
    from fusco.bench.explain import PlanRecord, RankLoad, ShuffleRecord

_OF_BOTH, _OF_SHUFFLE = ("--nodes", "--ranks-per-node", "--seed", "--json"), ("--shuffle", "--bytes-per-rank", "--skew")


def plan(
    context: typer.Context,
    *,
    nodes: options.Nodes = 2,
    ranks_per_node: options.RanksPerNode = 4,
    traffic: options.Pattern = "imbalanced",
    workload: options.WorkloadOptions,
    balancer: options.Balancer = "lanes",
    balance: Annotated[
        int | None,
        typer.Option(
            metavar="SPARE_PLACES",
            min=0,
            max=64,
            help="Show also which experts would be copied for this batch, with so many spare places on each rank.",
        ),
    ] = None,
    shuffle: Annotated[
        names.MatrixKind | None,
        typer.Option(help="Plan a shuffle of segments of these sizes between ranks, instead of a dispatch."),
    ] = None,
    bytes_per_rank: Annotated[
        int, typer.Option(min=1, max=1 << 50, help="With --shuffle: mean bytes that a rank sends.")
    ] = 16 << 20,
    skew: Annotated[float, typer.Option(min=0, max=100, help="With --shuffle zipf: skew of the sizes.")] = 0.8,
    json: options.JsonFile = None,
) -> None:
    """Explain one plan: traffic between nodes, ranks with and without lanes, balancers, duplicates avoided, memory.

    With --shuffle: which ranks send segments of others of their node, by default settings on the CPU.

    Pure computation: nothing is sent, and no other process is started.
    """
    topology = Topology.of_equal_nodes(nodes * ranks_per_node, ranks_per_node)
    _check(shuffle, options.given_options(context))
    workload.check([traffic])
    from fusco.bench.explain import explain, explain_shuffle  # it takes seconds, and options are right now
    from fusco.bench.inputs.matrices import make_rank_bytes
    from fusco.cpu.layout import SLICE_BYTES

    if shuffle is not None:
        rank_bytes = make_rank_bytes(shuffle, topology.world_size, bytes_per_rank, skew=skew, seed=workload.seed)
        segments = explain_shuffle(shuffle, rank_bytes, topology, SLICE_BYTES)
        _print_shuffle(segments, new_console(json))
        write_json_lines([segments], json)
        return
    (planned,) = workload.workloads([traffic], topology)
    record, console = explain(planned, balancer, balance), new_console(json)
    _print(record, console)
    if record.balanced_batch is not None:
        _print_batch(record.balanced_batch, console)
    chosen = f"with balancer '{record.balancer}'"
    console.print(conclusion(_busiest(record.ranks, record.bound_rows, chosen)), soft_wrap=True)
    write_json_lines([record], json)


def _check(shuffle: str | None, given: dict[str, Any]) -> None:
    """Raise ``ValueError`` for options of a dispatch with ``--shuffle``, and for options of a shuffle without it."""
    if shuffle is None:
        for option in _OF_SHUFFLE:
            if option in given:
                raise ValueError(f"{option} {given[option]} goes with --shuffle, such as --shuffle zipf")
    elif of_dispatch := [option for option in given if option not in (*_OF_BOTH, *_OF_SHUFFLE)]:
        raise ValueError(f"--shuffle plans segments, without tokens and experts: leave out {', '.join(of_dispatch)}")
    else:
        options.check_skew(given, "--shuffle", [shuffle])


def _print_shuffle(record: ShuffleRecord, console: Console) -> None:
    lanes = "with lanes" if record.has_lanes else "without lanes: no rank has 1/8 and a slice more than its share"
    console.print(
        f"shuffle of [bold]{record.matrix}[/] segments: {shape_of(record.nodes, record.ranks_per_node)}, {lanes}"
    )
    title = f"MB between nodes, by rank; bound {record.bound_bytes / 1e6:,.2f}: the busiest node's share for each rank"
    console.print(_table_of_ranks(title, record.ranks, lambda size: f"{size / 1e6:,.2f}"))
    if record.carried:
        carried = ResultTable("what ranks send for others of their node", ["carrier", "for rank", "to node", "MB"])
        for each in record.carried:
            carried.add_row(str(each.carrier), str(each.rank), str(each.to_node), f"{each.num_bytes / 1e6:,.2f}")
        console.print(carried)
    moved = sum(each.num_bytes for each in record.carried)
    console.print(
        f"within nodes: {moved / 1e6:,.2f} MB handed to carriers, {record.handed_on_bytes / 1e6:,.2f} MB handed on "
        f"after their arrival"
    )
    console.print(conclusion(_busiest(record.ranks, record.bound_bytes, "with lanes")), soft_wrap=True)


def _busiest(ranks: Sequence[RankLoad], bound: float, how: str) -> str:
    """Return the finding of a plan: how far the busiest rank is from the bound, and how far it would be."""
    if not bound:
        return "nothing crosses nodes"
    chosen = max(max(each.sends, each.receives) for each in ranks) / bound
    plain = max(max(each.plain_sends, each.plain_receives) for each in ranks) / bound
    return f"the busiest rank sends or receives {chosen:.2f} times the bound {how}, {plain:.2f} times plain"


def _table_of_ranks(title: str, ranks: Sequence[RankLoad], show: Callable[[int], str]) -> ResultTable:
    table = ResultTable(title, ["rank", "node", "sends", "receives", "plain: sends", "receives"])
    for rank in ranks:
        loads = (rank.sends, rank.receives, rank.plain_sends, rank.plain_receives)
        table.add_row(str(rank.rank), str(rank.node), *map(show, loads))
    return table


def _print(record: PlanRecord, console: Console) -> None:
    console.print(
        f"[bold]{record.traffic}[/] traffic: {shape_of(record.nodes, record.ranks_per_node)}, {record.tokens} "
        f"tokens a rank, top-{record.num_topk} of {record.num_experts} experts, {record.bytes_per_token} bytes a token"
    )
    columns = ["", *(f"node {node}" for node in range(record.nodes))]
    matrix = ResultTable("rows from node (down) to node (across), one copy for each token", columns)
    for node, row in enumerate(record.node_to_node_rows):
        matrix.add_row(f"node {node}", *(f"{count:,}" if count else "-" for count in row))
    console.print(matrix)

    title = f"rows between nodes, by rank: '{record.balancer}', and plain with equal local ranks"
    console.print(_table_of_ranks(title, record.ranks, "{:,}".format))

    title = f"busiest rank over the bound, {record.bound_rows:,.1f} rows: the busiest node's share for each rank"
    loads = ResultTable(title, ("balancer", "sends", "receives", "rows moved within nodes"), left=("balancer",))
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


def _print_batch(batch: BalancedBatch, console: Console) -> None:
    limits = {
        "": "",
        "places": "; no rank with a spare place has room for more",
        "copies": "; more copies cost too much",
    }
    title = (
        f"rows that ranks compute, with {batch.spare_places} spare places a rank: busiest over mean "
        f"{batch.busiest_over_mean_before:.2f}, then {batch.busiest_over_mean_after:.2f}{limits[batch.limit]}"
    )
    table = ResultTable(title, ["rank", "rows", "with copies", "experts copied here"], left=("experts copied here",))
    for rank, (before, after) in enumerate(zip(batch.rows_before, batch.rows_after, strict=True)):
        here = [
            f"{each.expert} of rank {each.home} ({each.num_rows:,} rows)" for each in batch.copies if each.rank == rank
        ]
        table.add_row(str(rank), f"{before:,}", f"{after:,}", ", ".join(here) or "-")
    console.print(table)
