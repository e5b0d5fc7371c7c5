"""``fusco bench prefill``: time to the first token of a Qwen3-MoE with expert parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from fusco.bench.names import STDOUT
from fusco.cli import options
from fusco.cli.bench_models import ModelOptions, begin_results, describe_shape, print_variants
from fusco.cli.reports import Column, case_of, compare, least_gain, report, table_of_cases, table_of_variants, timed
from fusco.cli.running import new_console, run_model
from fusco.cli.tables import describe_origin, verified_cell
from fusco.cli.testbed import PlaceOptions
from fusco.cli.wording import plural
from fusco.core.requirements import check_fsdp

if TYPE_CHECKING:
    from fusco.bench.prefill.job import PrefillJob
    from fusco.bench.prefill.records import PrefillRecord


@dataclass(frozen=True, kw_only=True)
class PrefillOptions(ModelOptions):
    """Options that describe the model, the cases and the variants, and the job that they describe."""

    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a rank. Default: 8192, of tiny 256.")] = None
    batches: Annotated[
        list[str],
        typer.Option(
            metavar="[NUMBER|ragged|skewed],...",
            help="Prompts of each rank: a number of equal ones; ragged, of the Azure trace; skewed, all ranks but one "
            "an eighth.",
        ),
    ] = ("1,4,ragged,skewed",)  # type: ignore[assignment]  # typer makes a list of it
    routing: Annotated[
        list[str],
        typer.Option(
            metavar="[random|trace|skewS],...",
            help="Experts of tokens: random, those of Qwen3-30B-A3B, or random with S times the mean rows on rank 0.",
        ),
    ] = ("random,trace",)  # type: ignore[assignment]  # as above
    balance: Annotated[
        bool, typer.Option("--balance", help="Measure fusco-balanced, too: busy experts are copied for each batch.")
    ] = False
    spare_places: options.SparePlacesOfBatch = 2
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        typer.Option(help="Dtype of weights and rows. Default: float32, on CUDA bfloat16."),
    ] = None
    iterations: Annotated[int | None, typer.Option(min=1, help="Timed prefills. Default: 20, of tiny 10.")] = None

    def job(self, place: PlaceOptions) -> tuple[PrefillJob, dict[str, str]]:
        """Return the job, and why variants that are not in it cannot run."""
        from fusco.bench.prefill.job import PrefillJob
        from fusco.bench.prefill.variants import VARIANTS, obstacle

        common, is_tiny = self.common(place), self.is_tiny(place.device)
        dtype = self.dtype or ("bfloat16" if place.device == "cuda" else "float32")
        usual = [name for name in VARIANTS if name != "fusco-balanced"]
        wanted = options.choose_names(self.variants or usual, list(VARIANTS), "variants")
        if self.balance and "fusco-balanced" not in wanted:
            wanted.append("fusco-balanced")
        chosen, skipped = options.runnable(wanted, lambda name: obstacle(name, place.device, dtype))
        job = PrefillJob(
            **common,
            tokens=self.tokens or (256 if is_tiny else 8192),
            batches=tuple(options.choose_names(self.batches, (), "batches")),
            routings=tuple(options.choose_names(self.routing, (), "routing")),
            variants=chosen,
            dtype=dtype,
            num_iterations=self.iterations or (10 if is_tiny else 20),
            spare_places=self.spare_places,
        )
        return job, skipped


def prefill(
    *,
    place: PlaceOptions,
    what: PrefillOptions,
    json: options.JsonFile = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Run only cases that the file of --json has not, and add them to it.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show all figures, and slow iterations.")] = False,
) -> None:
    """Measure the time to the first token of a Qwen3-MoE with random weights, its experts distributed over all ranks.

    Each rank has its own prompts. The outputs of all layers, and the logits of all tokens, are compared between
    variants before anything is timed; exit code 1 if they differ by more than rounding. Needs transformers.

    On GPUs: fusco bench prefill --device cuda --layers 24
    """
    check_fsdp("fusco bench prefill")
    from fusco.bench.prefill import records as results
    from fusco.cpu.kernels.warm_up import warm_up_cpu

    job, skipped = what.job(place)
    if resume and json in (None, STDOUT):
        raise ValueError("--resume needs --json FILE, the file of the run that it resumes")
    resumed = results.resume(job, json) if resume and json else results.Resumed(job, [], [])
    job = resumed.job
    place.run_there((warm_up_cpu,))
    from fusco.bench.prefill.rank import prefill_rank

    console = new_console(json)
    begin_results(json, skipped, resumed.lines)
    room = "weights of the model (--layers)", job.parameter_bytes
    records = run_model(prefill_rank, job, room, console, json) if job.cases else []
    if records is None:
        return
    records = [*resumed.kept, *records]
    _print(job, records, skipped, console, explain=explain)
    report(records, [], console, None, _name)


_COMPARED = ("baseline", "torch")  # the first of these that has run
_NAMES: tuple[Column, ...] = (("routing", "{.routing}"), ("batch", "{.batch}"))
_CASE = case_of(_NAMES)
_COLUMNS: tuple[Column, ...] = (
    ("tokens\n/s", timed("ttft_ms", "{.tokens_per_s:,}")),
    ("dispatch\nms", timed("ttft_ms", "{.dispatch_ms:,.2f}")),
    ("combine\nms", timed("ttft_ms", "{.combine_ms:,.2f}")),
    ("share of\nboth", timed("ttft_ms", "{.shuffle_share:.1%}")),
    ("error of\na layer", "{.layer_error:.1e}"),
    ("of\nlogits", "{.logits_error:.1e}"),
    ("verified", lambda record: verified_cell(record.verified)),
)


def _name(record: PrefillRecord) -> str:
    return f"{_CASE(record)}, {record.variant}"


def _print(
    job: PrefillJob, records: Sequence[PrefillRecord], skipped: Mapping[str, str], console: Console, *, explain: bool
) -> None:
    from fusco.bench.prefill.iterations import outliers
    from fusco.bench.prefill.variants import VARIANTS

    title = (
        f"prefill, {plural(job.num_ranks, 'rank')} on {job.device}, {job.tokens} tokens a rank, {job.dtype}: "
        f"{describe_shape(job.shape)}"
    )
    notes = (
        f"time from a barrier to the first tokens on the host, the slowest rank's, median of {job.num_iterations}; "
        "dispatch and combine are those of all layers, in separate prefills, means over ranks, waiting included",
        "errors: largest of a token, relative to its vector, against all_to_all_single with sums in float32",
        describe_origin(records[0], job.num_ranks, ("torch", "transformers")),
    )
    compared = next((name for name in _COMPARED if name in job.variants), "baseline")
    compared_ms = {_CASE(record): record.ttft_ms for record in records if record.variant == compared}

    def ratio(record: PrefillRecord) -> str:
        ms = compared_ms.get(_CASE(record))
        return f"{ms / record.ttft_ms:.2f}" if ms and record.ttft_ms else "-"

    columns: tuple[Column, ...] = (
        ("first token\nms", timed("ttft_ms", "{.ttft_ms:,.1f}")),
        ("p99\nms", timed("ttft_ms", "{.p99_ms:,.1f}")),
        (f"{compared}\n/ this", ratio),
        *_COLUMNS,
    )
    slow = [f"{_name(record)}: {line}" for record in records for line in outliers(record.iterations)]
    if explain:
        console.print(table_of_variants(records, title, _NAMES, columns, notes))
    else:
        console.print(table_of_cases(records, title, _NAMES, "ttft_ms", notes))
    print_variants(console, VARIANTS, job.variants, skipped, slow, explain=explain)
    console.print(least_gain(compare(records, "ttft_ms", _CASE)), soft_wrap=True)
