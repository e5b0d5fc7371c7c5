"""``fusco train``: a small Qwen3-MoE on real text, trained through fusco on processes or GPUs of this machine."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from fusco.bench.harness.json_lines import write_json_lines
from fusco.bench.names import STDOUT
from fusco.cli import options
from fusco.cli.curve import Curve, draw_curves, write_picture
from fusco.cli.options import Device
from fusco.cli.running import Interrupted, Terminated, absolute, check_room, new_console, num_devices, run_on_ranks
from fusco.cli.tables import ResultTable, conclusion, describe_origin
from fusco.cli.train_options import (
    FileOptions,
    RunOptions,
    SavingOptions,
    SizeOptions,
    keep_steps,
    num_steps_of,
    take_up,
    write_options,
)
from fusco.cli.wording import plural
from fusco.core.requirements import check_cuda_core, check_fsdp

if TYPE_CHECKING:
    from fusco.bench.ranks.torchrun import Launched
    from fusco.bench.train.job import TrainingJob
    from fusco.bench.train.rank import Saving
    from fusco.bench.train.records import Run, RunRecord

_CURVE_WIDTH = 100  # columns
_LIMIT_S = 7 * 24 * 3600.0  # of a whole run; ranks that die are detected at once


def train(
    *,
    context: typer.Context,
    run: RunOptions,
    sizes: SizeOptions,
    saving: SavingOptions,
    files: FileOptions,
    json: options.JsonFile = None,
) -> None:
    """Train a small Qwen3-MoE on real text, its experts distributed, and measure every step.

    Starts ranks on this machine; under torchrun, it is one of the job's ranks. Shows the loss, and the time of dispatch
    and combine, forward and backward. Needs transformers.

    On GPUs: fusco train --preset large --device cuda --dispatcher both
    """
    check_fsdp("fusco train")  # before anything is imported that takes seconds
    if saving.resume:
        given = [option.removeprefix("--").replace("-", "_") for option in options.given_options(context)]
        run, sizes = take_up(saving.resume, run, given), take_up(saving.resume, sizes, given)
        saving = take_up(saving.resume, saving, [*given, "save", "resume"])
    saving.check(run.dispatcher)
    targets = files.metric_targets(run.dispatcher, resumes=saving.resume is not None)
    from fusco.bench.inputs.traffic import check_trace_path, write_trace
    from fusco.bench.ranks.torchrun import launched
    from fusco.bench.train.records import summarize

    if files.record_trace:
        check_trace_path(files.record_trace)
    joined = launched()
    job = _job(run, sizes, saving, joined, targets)
    saves = _saving(saving, job)
    if saves and not saves.resumes and not (joined and joined.rank):
        write_options(saves.folder, (run, sizes, saving))
    console = new_console(json)
    runs = _run(job, saves, joined, console, keeps_routing=files.record_trace is not None, json=json)
    if runs is None:
        return
    records = summarize(job, runs)
    write_json_lines(records, json, appends=True)
    _print(job, records, console)
    _show_learning(runs, console, files.plot)
    console.print(conclusion(_found(records)), soft_wrap=True)
    if files.record_trace:
        assert runs[0].routing is not None
        write_trace(files.record_trace, runs[0].routing)
        console.print(_how_to_replay(job, files.record_trace), markup=False, highlight=False, soft_wrap=True)


def _job(
    run: RunOptions, sizes: SizeOptions, saving: SavingOptions, joined: Launched | None, metrics: tuple[str, ...]
) -> TrainingJob:
    """Return the run; ``ValueError`` for values that do not fit together."""
    from fusco.bench.harness.environment import record_of
    from fusco.bench.train.job import TrainingJob
    from fusco.bench.train.model import shape_of

    return record_of(
        TrainingJob,
        run,
        num_ranks=_num_ranks(run.ranks, run.device, joined),
        num_steps=run.steps,
        model=run.model.resolve() if run.model else None,
        export=saving.export.resolve() if saving.export else None,
        metrics=metrics,
        router_loss=_router_loss(run),
        forces_balance=run.forced_balance,
        spare_places=run.spare_places if run.balance else 0,
        dispatchers=("fusco", "torch") if run.dispatcher == "both" else (run.dispatcher,),
        **{**sizes.arguments(run.preset), **({"shape": shape_of(run.model)} if run.model else {})},
    )


def _saving(chosen: SavingOptions, job: TrainingJob) -> Saving | None:
    """Return where the run is saved; ``ValueError`` if the run that it continues has nothing left to do."""
    from fusco.bench.train.rank import Saving
    from fusco.fsdp import latest_run

    if chosen.folder is None:
        return None
    if chosen.resume:
        latest = latest_run(chosen.resume)
        if (done := num_steps_of(latest)) >= job.num_steps:
            raise ValueError(f"the run in {chosen.resume} has {done} steps, of --steps {job.num_steps}: ask for more")
    return Saving(
        folder=chosen.folder.resolve(),
        every=chosen.save_every,
        keep_last=chosen.keep_last,
        resumes=chosen.resume is not None and latest is not None,
    )


def _router_loss(run: RunOptions) -> float:
    """Return the weight of the router loss: by default some for Qwen3-MoE, and none for other kinds."""
    if run.router_loss is not None:
        return run.router_loss
    return 0.01 if run.architecture == "qwen3_moe" and run.model is None else 0.0


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
    job: TrainingJob,
    saves: Saving | None,
    joined: Launched | None,
    console: Console,
    *,
    keeps_routing: bool,
    json: Path | None,
) -> list[Run] | None:
    """Train. Problems of the machine or the text raise before any process starts."""
    from fusco.bench.train.rank import train_and_log
    from fusco.bench.train.text import load_text
    from fusco.cpu.kernels.warm_up import warm_up_cpu
    from fusco.fsdp import latest_run

    if job.device == "cuda" and "fusco" in job.dispatchers:
        check_cuda_core()
    if job.device == "cpu":
        check_room("parameters and the optimizer's states (--layers, --hidden)", job.parameter_bytes, job.num_ranks)
    if joined is None:
        load_text(job)
    if json and not (joined and joined.rank):
        keep_steps(json, latest_run(saves.folder) if saves and saves.resumes else None)
    try:
        results = run_on_ranks(
            train_and_log,
            (job, saves, keeps_routing, absolute(json)),
            job.num_ranks,
            console,
            device=job.device,
            prepare=(warm_up_cpu,),
            limit_s=_LIMIT_S,
        )
    except Interrupted as interrupt:
        has_steps = json is not None and json != STDOUT and json.is_file() and json.stat().st_size > 0
        kept = f"; the steps until then are in {json}" if has_steps else ""
        if saves and latest_run(saves.folder):
            kept += f"; to continue: fusco train --resume {shlex.quote(str(saves.folder))}"
        raise (Terminated if isinstance(interrupt, Terminated) else Interrupted)(kept) from interrupt
    return results[0] if results else None


_ARCHITECTURES = {"qwen3_moe": "Qwen3-MoE", "glm4_moe": "GLM-4-MoE"}
_ROWS = (
    ("loss of the first step", "first_loss", ".4f", "nats"),
    ("loss, mean of the last ten", "last_loss", ".4f", "nats"),
    ("loss of held-out text", "held_out_loss", ".4f", "nats"),
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
    what = job.model.name if job.model else _ARCHITECTURES[job.architecture]
    console.print(
        f"{what} of {one.num_parameters / 1e6:,.1f} million parameters: "
        f"{plural(shape.num_layers, 'layer')}, hidden {shape.hidden}, "
        f"top-{shape.num_topk} of {shape.num_experts} experts of width {shape.moe_intermediate}\n"
        f"{job.num_ranks} ranks on {job.device}, ep_size {job.ep_size}, {job.tokens} tokens a rank, {job.dtype}, "
        f"activation checkpointing {job.activation_checkpointing}, {job.num_steps} steps",
        highlight=False,
        soft_wrap=True,
    )
    ratio = [f"{records[1].dispatcher} / {one.dispatcher}"] if len(records) == 2 else []
    table = ResultTable("", ["", *(record.dispatcher for record in records), *ratio])
    for label, name, form, unit in _ROWS:
        values = [getattr(record, name) for record in records]
        if not all(values) and name in ("peak_memory_gib", "held_out_loss"):
            continue
        cells = [f"{value:{form}} {unit}".rstrip() for value in values]
        if len(records) == 2:
            cells.append(f"{values[1] / values[0]:.2f}" if name.endswith("_ms") and values[0] else "")
        table.add_row(label, *cells)
    console.print(table)
    for note in _notes(records):
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _show_learning(runs: Sequence[Run], console: Console, plot: Path | None) -> None:
    """Show the curves of losses, write them as a picture to ``plot``, and show what the first run's model writes."""
    curves: dict[str, Curve] = {}
    for run in runs:
        name = f"loss, {run.steps[0].dispatcher}"
        curves[name] = [(step.step + 1, step.loss) for step in run.steps]
        held_out = [(step.step + 1, step.held_out_loss) for step in run.steps if step.held_out_loss is not None]
        if held_out:
            curves[f"held-out {name}"] = held_out
    console.print(draw_curves(curves, min(console.width, _CURVE_WIDTH)), markup=False, highlight=False, soft_wrap=True)
    if plot:
        write_picture(plot, curves, "fusco train: nats per token by step")
        console.print(f"the same as a picture: {plot}", markup=False, highlight=False, soft_wrap=True)
    if runs[0].sample:
        prompt, continuation = runs[0].sample
        console.print(f"a sample: {prompt!r} continues as {continuation!r}", markup=False, highlight=False)


def _found(records: Sequence[RunRecord]) -> str:
    """Return what a run has learned, how fast, and how long the steps of another take beside it."""
    one = records[0]
    text = f"loss {one.first_loss:.3f} to {one.last_loss:.3f} nats, {one.tokens_per_s:,} tokens/s with {one.dispatcher}"
    others = [f"a step of {of.dispatcher} takes {of.step_ms / one.step_ms:.2f} times as long" for of in records[1:]]
    return "; ".join([text, *others])


def _notes(records: Sequence[RunRecord]) -> list[str]:
    one = records[0]
    after = f" after the first {one.num_warm_ups}" * bool(one.num_warm_ups)
    notes = [
        f"medians of the steps{after}; a step is the slowest rank's; dispatch and combine "
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
