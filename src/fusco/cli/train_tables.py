"""Tables of ``fusco train``: a column for each dispatcher, and the command that replays the routing."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from fusco.cli.tables import describe_origin, new_table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

    from fusco.train.job import TrainingJob
    from fusco.train.records import RunRecord

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


def print_runs(job: TrainingJob, records: Sequence[RunRecord], console: Console) -> None:
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
    table = new_table("", ["", *(record.dispatcher for record in records), *ratio])
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


def how_to_replay(job: TrainingJob, path: Path) -> str:
    """Return the command that replays the first ``ep_size`` ranks, whose tokens are the first of the trace."""
    return (
        f"to replay the last step's routing among the first {job.ep_size} ranks: fusco bench shuffle "
        f"--trace {shlex.quote(str(path))} --nodes 1 --ranks-per-node {job.ep_size} --tokens {job.tokens} "
        f"--hidden {job.shape.hidden} --num-experts {job.shape.num_experts} --num-topk {job.shape.num_topk} "
        f"--layer 0 --device {job.device}"
    )
