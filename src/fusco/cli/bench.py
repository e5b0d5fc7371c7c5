"""``fusco bench``: shuffle and all-to-all beside their baselines, verified first; balancers; schedules."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fusco.cli import options
from fusco.cli.bench_alltoall import alltoall
from fusco.cli.bench_device import bench_on_devices, print_device_records
from fusco.cli.bench_schedule import schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fusco.bench.results import ShuffleRecord
    from fusco.bench.shuffle import RankResult
    from fusco.bench.traffic import Workload
    from fusco.settings import Settings

app = typer.Typer(help="Measure, after verifying.", no_args_is_help=True)


class SliceOrder(str, Enum):
    """The values of ``Settings.slice_order``."""

    IN_TURN = "in-turn"
    STAGED = "staged"


class Device(str, Enum):
    """Where rows are."""

    CPU = "cpu"
    CUDA = "cuda"


app.command()(alltoall)
app.command()(schedule)


@app.callback()
def _bench() -> None:
    """Measure, after verifying."""


@app.command()
def shuffle(
    device: Annotated[Device, typer.Option(help="Where rows are.")] = Device.CPU,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes to play. Default: 2, on CUDA 1.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Default: 2, on CUDA as many as GPUs.")] = None,
    tokens: options.Tokens = 1024,
    hidden: options.Hidden = 4096,
    num_experts: options.NumExperts = 128,
    num_topk: options.NumTopk = 8,
    dtype: options.Dtype = options.RowDtype.BFLOAT16,
    traffic: options.Pattern = options.Traffic.TRACE,
    trace: options.TraceFile = None,
    trace_key: options.TraceKey = None,
    layer: options.Layer = 0,
    seed: options.Seed = 0,
    balancer: options.Balancer = options.BalancerName.SEND_AND_RECEIVE,
    slice_bytes: Annotated[int, typer.Option(min=1, help="Bytes of one message between nodes.")] = 1 << 20,
    ring_depth: Annotated[int, typer.Option(min=2, help="Slots of each ring.")] = 4,
    slice_order: Annotated[SliceOrder, typer.Option(help="Which node a rank sends to next.")] = SliceOrder.IN_TURN,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Limit of every wait, in seconds.")] = 60.0,
    num_sms: Annotated[int | None, typer.Option(min=1, help="On CUDA: multiprocessors that fusco may take.")] = None,
    iterations: Annotated[int, typer.Option(min=1, help="Timed iterations; medians are shown.")] = 20,
    json: options.JsonFile = None,
) -> None:
    """Time dispatch and combine of fusco and of the disaggregated baseline in one run, on processes of this machine.

    Every variant is verified against the law first: dispatched rows bit for bit, combined rows within what rounding
    explains. Exit code 1 if anything is off.
    """
    from fusco.bench.results import summarize, write_json_lines
    from fusco.settings import Settings

    if device is Device.CUDA:
        import torch

        nodes, ranks_per_node = nodes or 1, ranks_per_node or torch.cuda.device_count()
    workload = options.make_workload(
        traffic=traffic,
        nodes=nodes or 2,
        ranks_per_node=ranks_per_node or 2,
        tokens=tokens,
        hidden=hidden,
        num_experts=num_experts,
        num_topk=num_topk,
        dtype=dtype,
        trace=trace,
        trace_key=trace_key,
        layer=layer,
        seed=seed,
    )
    settings = Settings(
        slice_bytes=slice_bytes, ring_depth=ring_depth, timeout_s=timeout_s, slice_order=slice_order.value
    )
    console = Console()
    if device is Device.CUDA:
        on_devices = bench_on_devices(workload, settings, num_sms, iterations, console)
        if json:
            write_json_lines(on_devices, json)
        print_device_records(on_devices, console)
        raise typer.Exit(0 if all(record.verified for record in on_devices) else 1)
    ranks = _run(workload, settings, balancer.value, iterations, console)
    records = summarize(workload, balancer.value, ranks)
    if json:
        write_json_lines(records, json)
    _print(records, console)
    if not all(_is_right(record) for record in records):
        raise typer.Exit(1)


@app.command()
def balancers(
    draws: Annotated[int, typer.Option(min=1, help="Draws of loads for each shape.")] = 1000,
    seed: options.Seed = 0,
    json: options.JsonFile = None,
) -> None:
    """Compare balancers on bimodal loads: Beta(0.2, 0.2) for each rank, medians over draws."""
    from fusco.bench.balancers import compare_balancers
    from fusco.bench.results import write_json_lines

    records = compare_balancers([(2, 8), (4, 8), (8, 8)], draws, seed)
    if json:
        write_json_lines(records, json)
    table = Table(title=f"largest load over mean load, medians of {draws} draws", title_justify="left")
    for name in ("nodes x ranks", "balancer", "groups (what they send)", "ranks (what they receive)", "time"):
        table.add_column(name, justify="left" if name == "balancer" else "right")
    for i, record in enumerate(records):
        is_last = i + 1 == len(records) or records[i + 1].nodes != record.nodes
        table.add_row(
            f"{record.nodes} x {record.ranks_per_node}",
            record.balancer,
            f"{record.group_load_ratio:.3f}",
            f"{record.receive_ratio:.3f}",
            f"{record.microseconds:.0f} us",
            end_section=is_last,
        )
    Console().print(table)


def _run(
    workload: Workload, settings: Settings, balancer: str, num_iterations: int, console: Console
) -> list[RankResult]:
    from fusco.bench.local_world import LocalWorld
    from fusco.bench.progress import watching
    from fusco.bench.shuffle import num_steps, run_rank
    from fusco.kernels.warm_up import warm_up_cpu

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    num_ranks = workload.topology.world_size
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("compiling kernels (once)", total=num_steps(num_iterations))
        warm_up_cpu()  # here, so that the ranks find them on disk
        progress.update(task, description=f"starting {num_ranks} ranks")
        with LocalWorld(num_ranks) as world:

            def show(num_done: int) -> None:
                doing = "starting and verifying" if num_done < num_steps(0) else "measuring"
                progress.update(task, completed=num_done, description=doing)

            with watching(world.store, show):
                arguments = (workload, settings, balancer, num_iterations, world.store.port)
                return world.run(run_rank, num_ranks, *arguments)


def _is_right(record: ShuffleRecord) -> bool:
    """The law holds, and fusco sends no row between nodes that it need not."""
    sent = {record.internode_row_bytes, record.combine_internode_row_bytes}
    is_minimal = record.variant != "fusco" or sent == {record.internode_row_bytes_lower_bound}
    return record.verified and is_minimal


def _print(records: Sequence[ShuffleRecord], console: Console) -> None:
    by_name = {record.variant: record for record in records}
    ours, other = by_name["fusco"], by_name["baseline"]
    title = (
        f"shuffle, {ours.traffic} traffic: {ours.nodes} nodes x {ours.ranks_per_node} ranks, {ours.tokens} tokens a "
        f"rank, hidden {ours.hidden}, top-{ours.num_topk} of {ours.num_experts}, {ours.dtype}, on {ours.device}"
    )
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("")
    for name in (ours.variant, other.variant, "baseline / fusco"):
        table.add_column(name, justify="right")
    for label, name, unit in (
        ("dispatch", "dispatch_ms", "ms"),
        ("combine", "combine_ms", "ms"),
        ("dispatch + combine", "total_ms", "ms"),
        ("  planning", "planning_ms", "ms"),
        ("  staging (copy into shared memory)", "staging_ms", "ms"),
        ("  wire (and what is fused into it)", "wire_ms", "ms"),
        ("  only rearranging", "rearranging_ms", "ms"),
        ("rows between nodes", "internode_row_bytes", "MB"),
        ("  lower bound", "internode_row_bytes_lower_bound", "MB"),
        ("rows within nodes", "intranode_row_bytes", "MB"),
        ("metadata between nodes", "metadata_bytes", "MB"),
    ):
        scale = 1.0 if unit == "ms" else 1e-6
        values = [getattr(record, name) * scale for record in (ours, other)]
        ratio = f"{values[1] / values[0]:.2f}" if values[0] else "-"
        table.add_row(label, *(f"{value:,.2f} {unit}" for value in values), ratio, end_section=name == "rearranging_ms")
    table.add_row("verified", *("[green]yes[/]" if record.verified else "[red]NO[/]" for record in records), "")
    table.caption = "\n".join(_notes(ours))
    console.print(table)
    for error in [*ours.errors, *other.errors]:
        console.print(f"[red]{error}[/]")


def _notes(record: ShuffleRecord) -> list[str]:
    num_ranks = record.nodes * record.ranks_per_node
    notes = [
        f"medians of {record.num_iterations} iterations, the slowest rank's time; bytes of one dispatch, all ranks",
        f"links, all {num_ranks} ranks at once: copy {record.copy_peak_gbs:.1f} GB/s a rank",
    ]
    if record.nodes > 1:
        share_s = record.internode_row_bytes / num_ranks / (record.internode_peak_gbs * 1e9)
        notes[-1] += f", between nodes {record.internode_peak_gbs:.2f} GB/s each way"
        notes.append(
            f"dispatch's rows between nodes at that peak: {share_s * 1e3:.1f} ms, "
            f"{share_s * 1e3 / record.dispatch_ms:.0%} of the time dispatch took"
        )
    if record.trace:
        needed = record.tokens * num_ranks
        repeats = f"; repeated {record.trace_repeats:.2f} times for {needed} tokens" if record.trace_repeats > 1 else ""
        notes.append(f"trace: {record.trace}{repeats}")
    cores = record.hardware["num_cores"]
    notes.append(f"{record.hardware['cpu']}, {cores} cores; torch {record.versions['torch']}; commit {record.commit}")
    return notes
