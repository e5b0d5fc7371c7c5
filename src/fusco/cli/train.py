"""``fusco train``: a small Qwen3-MoE on real text, trained through fusco on processes or GPUs of this machine."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fusco.cli import options
from fusco.cli.options import Device
from fusco.cli.origin import describe_origin
from fusco.cli.running import num_devices

if TYPE_CHECKING:
    from fusco.train.job import TrainingJob
    from fusco.train.records import RunRecord
    from fusco.train.world import Joined


class DispatcherName(str, Enum):
    """What moves tokens."""

    FUSCO = "fusco"
    TORCH = "torch"
    BOTH = "both"


class Checkpointing(str, Enum):
    """The values of ``activation_checkpointing``; a test compares them."""

    NONE = "none"
    FULL = "full"
    SELECTIVE = "selective"


class TrainDtype(str, Enum):
    """Dtypes to compute in."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class PresetName(str, Enum):
    """The keys of ``_PRESETS``."""

    SMALL = "small"
    LARGE = "large"


@dataclass(frozen=True, kw_only=True)
class _Preset:
    layers: int
    hidden: int
    num_experts: int
    num_topk: int
    moe_intermediate: int
    tokens: int
    length: int
    lr: float
    dtype: Literal["float32", "bfloat16"]

    def changed(self, **given: Any) -> _Preset:
        """With what the user has given."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})


_PRESETS = {
    # 200 steps on four processes of two cores in about two minutes.
    PresetName.SMALL: _Preset(
        layers=4,
        hidden=128,
        num_experts=16,
        num_topk=4,
        moe_intermediate=128,
        tokens=512,
        length=128,
        lr=3e-3,
        dtype="float32",
    ),
    # For four GPUs: an eighth of the layers of Qwen3-30B-A3B and half of its experts.
    PresetName.LARGE: _Preset(
        layers=8,
        hidden=2048,
        num_experts=64,
        num_topk=8,
        moe_intermediate=768,
        tokens=8192,
        length=2048,
        lr=3e-4,
        dtype="bfloat16",
    ),
}


def _from_preset(name: str) -> str:
    return (
        f"Default: {getattr(_PRESETS[PresetName.SMALL], name)}, in large {getattr(_PRESETS[PresetName.LARGE], name)}."
    )


def train(
    preset: Annotated[PresetName, typer.Option(help="Sizes to start from; large is for 4 GPUs.")] = PresetName.SMALL,
    device: Annotated[Device, typer.Option(help="Where ranks compute.")] = Device.CPU,
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes. Default: 4, on CUDA one a GPU.")] = None,
    ep_size: Annotated[int, typer.Option(min=1, help="Ranks among which experts are distributed.")] = 2,
    layers: Annotated[int | None, typer.Option(min=1, help="Blocks. " + _from_preset("layers"))] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Elements of a row. " + _from_preset("hidden"))] = None,
    num_experts: Annotated[
        int | None, typer.Option(min=1, help="Experts of a layer. " + _from_preset("num_experts"))
    ] = None,
    num_topk: Annotated[int | None, typer.Option(min=1, help="Experts of a token. " + _from_preset("num_topk"))] = None,
    moe_intermediate: Annotated[
        int | None, typer.Option(min=1, help="Inner width of an expert. " + _from_preset("moe_intermediate"))
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each rank in a step. " + _from_preset("tokens"))
    ] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence. " + _from_preset("length"))] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 200,
    lr: Annotated[float | None, typer.Option(min=0, help="Learning rate of AdamW. " + _from_preset("lr"))] = None,
    router_loss: Annotated[
        float, typer.Option(min=0, help="Weight of the loss that evens out the experts' loads; 0 for none.")
    ] = 0.01,
    dispatcher: Annotated[
        DispatcherName, typer.Option(help="What moves tokens; both: one run each, from the same weights, compared.")
    ] = DispatcherName.FUSCO,
    activation_checkpointing: Annotated[
        Checkpointing,
        typer.Option(
            help="What blocks compute again in the backward pass: nothing, all, all but dispatch and combine."
        ),
    ] = Checkpointing.NONE,
    dtype: Annotated[
        TrainDtype | None,
        typer.Option(help="Computed in; parameters stay in float32. " + _from_preset("dtype")),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="File or directory to learn, a byte a token. Default: this machine's Python sources."),
    ] = None,
    text_bytes: Annotated[int, typer.Option(min=1, help="Bytes of it at most.")] = 32 << 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and batches.")] = 0,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Limit of every wait in fusco, in seconds.")] = 60.0,
    record_trace: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Write the last step's routing here (npz or npy), for fusco bench --trace."),
    ] = None,
    json: options.JsonFile = None,
) -> None:
    """Train a small Qwen3-MoE on real text, its experts distributed, and measure every step.

    Starts its ranks on this machine, or, under torchrun, is one of them. Shown are the loss, and the time that dispatch
    and combine take, forward and backward. Needs transformers.

    On 4 GPUs: fusco train --preset large --device cuda --dispatcher both
    """
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("fusco train needs transformers: pip install 'fusco[fsdp]'")
    from fusco.bench.results import write_json_lines
    from fusco.checks import check_cuda_core
    from fusco.train.job import ModelShape, TrainingJob
    from fusco.train.records import summarize
    from fusco.train.text import load_text
    from fusco.train.trace import check_trace_path, write_trace
    from fusco.train.world import joined_by_torchrun, run_here, run_joined

    if record_trace:
        check_trace_path(record_trace)
    sizes = _PRESETS[preset].changed(
        layers=layers,
        hidden=hidden,
        num_experts=num_experts,
        num_topk=num_topk,
        moe_intermediate=moe_intermediate,
        tokens=tokens,
        length=length,
        lr=lr,
        dtype=dtype.value if dtype else None,
    )
    with joined_by_torchrun(device.value) as joined:
        job = TrainingJob(
            shape=ModelShape(
                num_layers=sizes.layers,
                hidden=sizes.hidden,
                num_experts=sizes.num_experts,
                num_topk=sizes.num_topk,
                moe_intermediate=sizes.moe_intermediate,
            ),
            device=device.value,
            num_ranks=_num_ranks(ranks, device, joined),
            ep_size=ep_size,
            tokens=sizes.tokens,
            length=sizes.length,
            num_steps=steps,
            learning_rate=sizes.lr,
            router_loss=router_loss,
            dispatchers=("fusco", "torch") if dispatcher is DispatcherName.BOTH else (dispatcher.value,),
            activation_checkpointing=activation_checkpointing.value,
            dtype=sizes.dtype,
            seed=seed,
            text=text,
            text_bytes=text_bytes,
            timeout_s=timeout_s,
        )
        if job.device == "cuda" and "fusco" in job.dispatchers:
            check_cuda_core()  # what is wrong is said before any process starts
        if joined is None:
            load_text(job)
        console = Console(quiet=joined is not None and joined.rank != 0)
        if json and not console.quiet:
            write_json_lines([], json)
        start = run_here if joined is None else run_joined
        with _showing(job, console) as report:
            try:
                runs = start(job, report, keeps_routing=record_trace is not None, log=json)
            except KeyboardInterrupt:
                console.print(
                    "interrupted" + (f"; the steps until then are in {json}" if json else ""),
                    markup=False,
                    soft_wrap=True,
                )
                raise
    if console.quiet:
        return
    records = summarize(job, runs)
    if json:
        write_json_lines(records, json, appends=True)
    _print(job, records, console)
    if record_trace:
        assert runs[0].routing is not None
        write_trace(record_trace, runs[0].routing)
        console.print(_how_to_replay(job, record_trace), markup=False, highlight=False, soft_wrap=True)


def _num_ranks(wanted: int | None, device: Device, joined: Joined | None) -> int:
    found = num_devices(device.value)
    if device is Device.CUDA and not found:
        raise ValueError("--device cuda needs a GPU, and torch finds none")
    if joined is not None:
        if wanted not in (None, joined.num_ranks):
            raise ValueError(f"--ranks {wanted} under torchrun, which has started {joined.num_ranks}")
        return joined.num_ranks
    num_ranks = wanted or found or 4
    if found and num_ranks > found:
        raise ValueError(f"{num_ranks} ranks need a GPU each, and torch finds {found}")
    return num_ranks


@contextmanager
def _showing(job: TrainingJob, console: Console) -> Iterator[Callable[[int, str], None]]:
    """A bar with the latest step, and a line for every twentieth of the run, which stay."""
    num_steps = job.num_steps * len(job.dispatchers)
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task, next_line = progress.add_task(f"starting {job.num_ranks} ranks", total=num_steps), 1

        def report(num_done: int, latest: str) -> None:
            nonlocal next_line
            if not num_done:
                return
            progress.update(task, completed=num_done, description=latest)
            if num_done >= next_line:
                next_line = num_done + max(1, num_steps // 20)
                progress.console.print(latest, highlight=False, soft_wrap=True)

        yield report


def _print(job: TrainingJob, records: Sequence[RunRecord], console: Console) -> None:
    one, shape = records[0], job.shape
    console.print(
        f"Qwen3-MoE of {one.num_parameters / 1e6:,.1f} million parameters: {shape.num_layers} layers, hidden "
        f"{shape.hidden}, top-{shape.num_topk} of {shape.num_experts} experts of width {shape.moe_intermediate}\n"
        f"{job.num_ranks} ranks on {job.device}, ep_size {job.ep_size}, {job.tokens} tokens a rank, {job.dtype}, "
        f"activation checkpointing {job.activation_checkpointing}, {job.num_steps} steps",
        highlight=False,
        soft_wrap=True,
    )
    table = Table()
    table.add_column("")
    for record in records:
        table.add_column(record.dispatcher, justify="right")
    if len(records) == 2:
        table.add_column(f"{records[1].dispatcher} / {one.dispatcher}", justify="right")
    for label, name, form, unit in (
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
    ):
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
        "are those of all layers, means over ranks, waiting for others counted",
    ]
    if len(records) == 2:
        notes.append(f"losses of the two, step by step: at most {records[1].max_loss_difference:.6f} nats apart")
    return [*notes, describe_origin(one, one.job["num_ranks"], ("torch", "transformers"))]


def _how_to_replay(job: TrainingJob, path: Path) -> str:
    """The exchange of the first ``ep_size`` ranks, whose tokens are the first of the trace."""
    return (
        f"to replay the last step's routing among the first {job.ep_size} ranks: fusco bench shuffle "
        f"--trace {shlex.quote(str(path))} --nodes 1 --ranks-per-node {job.ep_size} --tokens {job.tokens} "
        f"--hidden {job.shape.hidden} --num-experts {job.shape.num_experts} --num-topk {job.shape.num_topk} "
        f"--layer 0 --device {job.device}"
    )
