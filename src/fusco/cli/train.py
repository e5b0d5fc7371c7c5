"""``fusco train``: a small Qwen3-MoE on real text, trained through fusco on processes or GPUs of this machine."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from fusco.bench.harness.json_lines import write_json_lines
from fusco.bench.names import STDOUT
from fusco.cli import options
from fusco.cli.options import Device, with_groups
from fusco.cli.running import Interrupted, Terminated, absolute, check_room, new_console, num_devices, run_on_ranks
from fusco.cli.tables import ResultTable, describe_origin
from fusco.cli.train_presets import PresetName, SizeOptions
from fusco.core.requirements import check_cuda_core, check_fsdp

if TYPE_CHECKING:
    from fusco.ranks.torchrun import Launched
    from fusco.train.job import TrainingJob
    from fusco.train.records import Run, RunRecord

_LIMIT_S = 7 * 24 * 3600.0  # of a whole run; ranks that die are detected at once


@with_groups
def train(
    *,
    preset: Annotated[PresetName, typer.Option(help="Sizes to start from; large is for GPUs.")] = "small",
    device: Annotated[Device, typer.Option(help="Where ranks compute.")] = "cpu",
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes. Default: 4, on CUDA one for each GPU.")] = None,
    ep_size: Annotated[int, typer.Option(min=1, help="Ranks among which experts are distributed.")] = 2,
    sizes: SizeOptions,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 200,
    router_loss: Annotated[
        float, typer.Option(min=0, help="Weight of the loss that evens out the experts' loads; 0 for none.")
    ] = 0.01,
    dispatcher: Annotated[
        Literal["fusco", "torch", "both"],
        typer.Option(help="What moves tokens; both: one run each from the same weights, compared."),
    ] = "fusco",
    activation_checkpointing: Annotated[
        Literal["none", "full", "selective"],
        typer.Option(help="What blocks recompute in the backward pass: nothing, all, all but dispatch and combine."),
    ] = "none",
    text: Annotated[
        Path | None,
        typer.Option(help="File or directory to train on, one token per byte. Default: this machine's Python sources."),
    ] = None,
    text_bytes: Annotated[int, typer.Option(min=1, help="Maximum bytes of the text.")] = 32 << 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and batches.")] = 0,
    timeout_s: options.Timeout = 60.0,
    record_trace: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            callback=options.check_writable,
            help="Write the last step's routing here (npz or npy), for fusco bench --trace.",
        ),
    ] = None,
    json: options.JsonFile = None,
) -> None:
    """Train a small Qwen3-MoE on real text, its experts distributed, and measure every step.

    Starts ranks on this machine; under torchrun, it is one of the job's ranks. Shows the loss, and the time of dispatch
    and combine, forward and backward. Needs transformers.

    On GPUs: fusco train --preset large --device cuda --dispatcher both
    """
    check_fsdp("fusco train")  # before anything is imported that takes seconds
    from fusco.bench.inputs.traffic import check_trace_path, write_trace
    from fusco.ranks.torchrun import launched
    from fusco.train.job import TrainingJob
    from fusco.train.records import summarize

    if record_trace:
        check_trace_path(record_trace)
    joined = launched()
    job = TrainingJob(
        device=device,
        num_ranks=_num_ranks(ranks, device, joined),
        ep_size=ep_size,
        num_steps=steps,
        router_loss=router_loss,
        dispatchers=("fusco", "torch") if dispatcher == "both" else (dispatcher,),
        activation_checkpointing=activation_checkpointing,
        seed=seed,
        text=text,
        text_bytes=text_bytes,
        timeout_s=timeout_s,
        **sizes.arguments(preset),
    )
    console = new_console(json)
    runs = _run(job, joined, console, keeps_routing=record_trace is not None, json=json)
    if runs is None:
        return
    records = summarize(job, runs)
    write_json_lines(records, json, appends=True)
    _print(job, records, console)
    if record_trace:
        assert runs[0].routing is not None
        write_trace(record_trace, runs[0].routing)
        console.print(_how_to_replay(job, record_trace), markup=False, highlight=False, soft_wrap=True)


def _num_ranks(wanted: int | None, device: Device, joined: Launched | None) -> int:
    found = num_devices(device)
    if joined is not None:
        if wanted not in (None, joined.world_size):
            raise ValueError(f"--ranks {wanted} under torchrun, which has started {joined.world_size}")
        return joined.world_size
    num_ranks = wanted or found or 4
    if found and num_ranks > found:
        raise ValueError(f"{num_ranks} ranks need a GPU each, and torch finds {found}")
    return num_ranks


def _run(
    job: TrainingJob, joined: Launched | None, console: Console, *, keeps_routing: bool, json: Path | None
) -> list[Run] | None:
    """Train. Problems of the machine or the text raise before any process starts."""
    from fusco.cpu.kernels.warm_up import warm_up_cpu
    from fusco.train.rank import train_and_log
    from fusco.train.text import load_text

    if job.device == "cuda" and "fusco" in job.dispatchers:
        check_cuda_core()
    if job.device == "cpu":
        check_room("parameters and the optimizer's states (--layers, --hidden)", job.parameter_bytes, job.num_ranks)
    if joined is None:
        load_text(job)
    if json and not (joined and joined.rank):
        write_json_lines([], json)
    try:
        results = run_on_ranks(
            train_and_log,
            (job, keeps_routing, absolute(json)),
            job.num_ranks,
            console,
            device=job.device,
            prepare=(warm_up_cpu,),
            limit_s=_LIMIT_S,
        )
    except Interrupted as interrupt:
        has_steps = json is not None and json != STDOUT and json.is_file() and json.stat().st_size > 0
        kept = f"; the steps until then are in {json}" if has_steps else ""
        raise (Terminated if isinstance(interrupt, Terminated) else Interrupted)(kept) from interrupt
    return results[0] if results else None


_ROWS = (
    ("loss of the first step", "first_loss", ".4f", "nats"),
    ("loss, mean of the last ten", "last_loss", ".4f", "nats"),
    ("step", "step_ms", ",.2f", "ms"),
    ("tokens of all ranks", "tokens_per_s", ",", "/s"),
    ("dispatch", "dispatch_ms", ",.2f", "ms"),
    ("combine", "combine_ms", ",.2f", "ms"),
    ("combine, backward", "combine_backward_ms", ",.2f", "ms"),
    ("dispatch, backward", "dispatch_backward_ms", ",.2f", "ms"),
    ("these four, of the step", "shuffle_share", ".1%", ""),
    ("busiest expert / mean, first step", "first_expert_imbalance", ".2f", ""),
    ("busiest expert / mean, last step", "last_expert_imbalance", ".2f", ""),
    ("peak GPU memory of rank 0", "peak_memory_gib", ".2f", "GiB"),
)


def _print(job: TrainingJob, records: Sequence[RunRecord], console: Console) -> None:
    """Print the configuration, a column for each run, and notes on the figures."""
    one, shape = records[0], job.shape
    console.print(
        f"Qwen3-MoE of {one.num_parameters / 1e6:,.1f} million parameters: {shape.num_layers} layers, hidden "
        f"{shape.hidden}, top-{shape.num_topk} of {shape.num_experts} experts of width {shape.moe_intermediate}\n"
        f"{job.num_ranks} ranks on {job.device}, ep_size {job.ep_size}, {job.tokens} tokens a rank, {job.dtype}, "
        f"activation checkpointing {job.activation_checkpointing}, {job.num_steps} steps",
        highlight=False,
        soft_wrap=True,
    )
    ratio = [f"{records[1].dispatcher} / {one.dispatcher}"] if len(records) == 2 else []
    table = ResultTable("", ["", *(record.dispatcher for record in records), *ratio])
    for label, name, form, unit in _ROWS:
        values = [getattr(record, name) for record in records]
        if name == "peak_memory_gib" and not any(values):
            continue
        cells = [f"{value:{form}} {unit}".rstrip() for value in values]
        if len(records) == 2:
            cells.append(f"{values[1] / values[0]:.2f}" if name.endswith("_ms") and values[0] else "")
        table.add_row(label, *cells)
    console.print(table)
    for note in _notes(records):
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _notes(records: Sequence[RunRecord]) -> list[str]:
    one = records[0]
    notes = [
        f"medians of the steps after the first {one.num_warm_ups}; a step is the slowest rank's; dispatch and combine "
        "are those of all layers, means over ranks, waiting for others included"
    ]
    if len(records) == 2:
        notes.append(f"losses of the two, step by step: at most {records[1].max_loss_difference:.6f} nats apart")
    return [*notes, describe_origin(one, one.job["num_ranks"], ("torch", "transformers"))]


def _how_to_replay(job: TrainingJob, path: Path) -> str:
    """Return the command that replays the first ``ep_size`` ranks, whose tokens are the first of the trace."""
    return (
        f"to replay the last step's routing among the first {job.ep_size} ranks: fusco bench shuffle "
        f"--trace {shlex.quote(str(path))} --nodes 1 --ranks-per-node {job.ep_size} --tokens {job.tokens} "
        f"--hidden {job.shape.hidden} --num-experts {job.shape.num_experts} --num-topk {job.shape.num_topk} "
        f"--layer 0 --device {job.device}"
    )
