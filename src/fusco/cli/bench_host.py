"""``fusco bench host``: time that a dispatch and a combine take on the host, by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fusco.cli import options
from fusco.cli.reports import report
from fusco.cli.running import check_room, new_console, num_devices, run_on_ranks
from fusco.cli.tables import ResultTable, conclusion, describe_origin
from fusco.core.topology import Topology

if TYPE_CHECKING:
    from fusco.bench.host.times import HostRecord


def host(
    device: Annotated[
        Literal["null", "cuda"], typer.Option(help="null: a device that does nothing, on any machine. cuda: GPUs.")
    ] = "null",
    ranks: Annotated[
        list[int] | None, typer.Option(min=1, help="Numbers of ranks. Default: 1 and 2; between nodes one for each.")
    ] = None,
    nodes: options.Nodes = 1,
    tokens: options.Tokens = 128,
    hidden: options.Hidden = 7168,
    num_experts: options.NumExperts = 256,
    num_topk: options.NumTopk = 8,
    calls: Annotated[int, typer.Option(min=1, help="Pairs of a round; the median of 7 rounds is shown.")] = 1000,
    json: options.JsonFile = None,
) -> None:
    """Time a dispatch and a combine on the host: exactly sized and into static rows, with a budget by step.

    Also a dispatch along a handle, and a combine_all of rows and a weight for each of their k.

    With the null device kernels end at once and move nothing, so the time is that of the host alone. Times of steps are
    from a run of their own, and include the clocks that are read around each.
    """
    if num_topk > num_experts:
        raise ValueError(f"num_topk is {num_topk}, more than the {num_experts} experts")
    if uneven := [num_ranks for num_ranks in ranks or () if num_ranks % nodes]:
        raise ValueError(f"--ranks {uneven[0]} do not divide among {nodes} nodes")
    from fusco.bench.host.times import HostRun, measure_host, records_of  # it takes seconds, and sizes are right now

    console, records = new_console(json), []
    on = "cuda" if device == "cuda" else "cpu"
    num_devices(on)  # before any process starts
    for num_ranks in ranks or ([nodes] if nodes > 1 else [1, 2] if device == "null" else [1]):
        run = HostRun(
            device=device,
            num_ranks=num_ranks,
            ranks_per_node=num_ranks // nodes,
            num_tokens=tokens,
            hidden=hidden,
            num_experts=num_experts,
            num_topk=num_topk,
            num_calls=calls,
        )
        check_room("rows (--tokens, --hidden)", 2 * tokens * hidden, num_ranks)
        topology = Topology.of_equal_nodes(num_ranks, num_ranks // nodes)
        measured = run_on_ranks(measure_host, (run,), num_ranks, console, device=on, topology=topology)
        records += records_of(run, measured) if measured else []
    if records:
        pairs = ", ".join(f"{record.variant} {record.pair_us:.1f} us on {_ranks(record)}" for record in records)
        found = conclusion(f"a dispatch and a combine take the host: {pairs}")
        report(records, [_table(records), found], console, json)


def _table(records: list[HostRecord]) -> ResultTable:
    one = records[0]
    title = (
        f"host, us a pair: {one.num_tokens} tokens of {one.hidden} bf16, top-{one.num_topk} of {one.num_experts}, "
        f"device {one.device}"
    )
    columns = ("", *(f"{record.variant}\n{_ranks(record)}" for record in records))
    table = ResultTable(title, columns, [describe_origin(one, 1)])
    for name in ("dispatch", "combine", "pair", "dispatch_again", "combine_all"):
        cells = (f"{getattr(record, f'{name}_us'):.1f}" for record in records)
        table.add_row(name, *cells, end_section=name in ("pair", "combine_all"))
    for step in (step for step in one.step_us if any(record.step_us[step] for record in records)):
        table.add_row(step, *(f"{record.step_us[step]:.1f}" for record in records))
    return table


def _ranks(record: HostRecord) -> str:
    nodes, num_ranks = record.num_ranks // record.ranks_per_node, record.num_ranks
    return f"{nodes} x {record.ranks_per_node}" if nodes > 1 else f"{num_ranks} rank{'s' * (num_ranks > 1)}"
