"""``fusco bench shuffle --device cuda``: run it on this machine's GPUs, and show it as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fusco.bench.device_results import DeviceRecord
    from fusco.bench.traffic import Workload
    from fusco.settings import Settings


def bench_on_devices(
    workload: Workload, settings: Settings, num_sms: int | None, num_iterations: int, console: Console
) -> list[DeviceRecord]:
    """Measure every variant on one process a GPU; ``ValueError`` if there are too few."""
    import torch

    from fusco.bench.device_results import summarize_device
    from fusco.bench.device_shuffle import num_device_steps, run_device_rank
    from fusco.bench.local_world import LocalWorld
    from fusco.bench.progress import watching

    num_ranks, num_devices = workload.topology.world_size, torch.cuda.device_count()
    if workload.topology.num_nodes > 1:
        raise ValueError(f"--device cuda works within one node so far: --nodes 1, not {workload.topology.num_nodes}")
    if num_ranks > num_devices:
        raise ValueError(f"{num_ranks} ranks need a GPU each, but torch finds {num_devices}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"starting {num_ranks} ranks", total=num_device_steps())
        with LocalWorld(num_ranks, "cuda") as world:

            def show(num_done: int) -> None:
                progress.update(task, completed=num_done, description="verifying and measuring")

            with watching(world.store, show):
                arguments = (workload, settings, num_sms, num_iterations, world.store.port)
                ranks = world.run(run_device_rank, num_ranks, *arguments)
    return summarize_device(workload, ranks, num_iterations)


def print_device_records(records: Sequence[DeviceRecord], console: Console) -> None:
    """A row for each variant, and below it what the run looked like."""
    ours = records[0]
    table = Table(
        title=(
            f"shuffle, {ours.traffic} traffic: {ours.ranks_per_node} GPUs, {ours.tokens} tokens a rank, hidden "
            f"{ours.hidden}, top-{ours.num_topk} of {ours.num_experts}, {ours.dtype}"
        ),
        title_justify="left",
        caption="\n".join(_notes(ours)),
        caption_justify="left",
    )
    baseline_ms = next((record.total_ms for record in records if record.variant == "baseline"), None)
    columns = ("dispatch", "combine", "both", "baseline / it", "dispatch", "of peak", "combine", "of peak", "verified")
    table.add_column("ms, and GB/s of rows")
    for name in columns:
        table.add_column(name, justify="right")
    for record in records:
        ratio = f"{baseline_ms / record.total_ms:.2f}" if baseline_ms and record.total_ms else "-"
        table.add_row(
            record.variant,
            *(_number(time_ms, ".3f") for time_ms in (record.dispatch_ms, record.combine_ms, record.total_ms)),
            ratio,
            _number(record.dispatch_gbs, ".0f"),
            _number(record.dispatch_of_peak, ".0%"),
            _number(record.combine_gbs, ".0f"),
            _number(record.combine_of_peak, ".0%"),
            "[green]yes[/]" if record.verified else "[red]NO[/]",
        )
    console.print(table)
    for record in records:
        for error in record.errors:
            console.print(f"[red]{record.variant}: {error}[/]")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _notes(record: DeviceRecord) -> list[str]:
    peaks = record.peaks
    floor_ms = record.remote_row_bytes / 1e6 / peaks["copy_engine_pull_gbs"] if peaks["copy_engine_pull_gbs"] else 0.0
    kernels = ", ".join(f"{name} {us:.0f}" for name, us in record.kernel_us.items())
    return [
        f"medians of {record.num_iterations}, the slowest rank's, on the device, once all ranks' devices have met; "
        f"planning and barriers counted",
        "fusco: output sized exactly (one wait on the host); fusco-graph: static slots, in a CUDA graph; "
        "fusco-in-place: so, with rows where peers can read them; fusco-fp8: as fusco-graph, values and scales",
        "baseline: NCCL all-to-all and index_select",
        f"each rank must take in up to {record.remote_row_bytes / 1e6:.1f} MB of rows: {floor_ms:.3f} ms at the peak",
        f"peaks in GB/s: copy engine {peaks['copy_engine_pull_gbs']:.0f} pulling, {peaks['copy_engine_push_gbs']:.0f} "
        f"pushing; multiprocessors {peaks['sm_pull_gbs']:.0f} and {peaks['sm_push_gbs']:.0f}; local "
        f"{peaks['local_gbs']:.0f} read and written",
        f"multiprocessors taken: {record.num_sms}; kernels of variant fusco in us: {kernels}",
        f"{record.ranks_per_node} x {record.hardware['gpu']}; torch {record.versions['torch']}; commit {record.commit}",
    ]
