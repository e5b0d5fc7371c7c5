"""``fusco bench decode``: time per output token of a Qwen3-MoE shape with expert parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from fusco.cli import options
from fusco.cli.bench_models import ModelOptions, begin_results, describe_shape, print_variants
from fusco.cli.reports import Column, case_of, report, table_of_cases, table_of_variants, timed
from fusco.cli.running import new_console, run_model
from fusco.cli.tables import conclusion, describe_origin, verified_cell
from fusco.cli.testbed import PlaceOptions
from fusco.cli.wording import plural
from fusco.core.requirements import check_fsdp

if TYPE_CHECKING:
    from fusco.bench.decode.job import DecodeJob
    from fusco.bench.decode.records import DecodeRecord


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(ModelOptions):
    """Options that describe the model, the cases and the variants, and the job that they describe."""

    tokens: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NUMBER,...", help="Tokens of a rank in a step, one a sequence. Default: 1 to 512, of tiny 1,8,32."
        ),
    ] = None
    micro_batches: Annotated[
        list[str], typer.Option(metavar="[1|2],...", help="Parts of a step; of two, one computes as one travels.")
    ] = ("1,2",)  # type: ignore[assignment]  # typer makes a list of it
    dtype: Annotated[
        Literal["bfloat16", "fp8", "float32"], typer.Option(help="Of experts' weights and rows; fp8 has scales.")
    ] = "bfloat16"
    context: Annotated[
        int, typer.Option(min=0, max=1 << 20, help="Tokens of each sequence before the step; 0: without attention.")
    ] = 0
    routing: Annotated[
        str,
        typer.Option(
            metavar="random|trace|skewS",
            help="Experts of tokens: random, those of Qwen3-30B-A3B, or random with S times the mean rows on rank 0.",
        ),
    ] = "random"
    iterations: Annotated[int | None, typer.Option(min=1, help="Timed steps. Default: 50, of tiny 20.")] = None

    def job(self, place: PlaceOptions) -> tuple[DecodeJob, dict[str, str]]:
        """Return the job, and why variants that are not in it cannot run."""
        if self.tokens:
            options.integers(self.tokens, "tokens")
        micro_batches = tuple(options.integers(self.micro_batches, "micro-batches"))
        from fusco.bench.decode.exchanges import VARIANTS, obstacle
        from fusco.bench.decode.job import DecodeJob

        common, is_tiny = self.common(place), self.is_tiny(place.device)
        wanted = options.choose_names(self.variants, list(VARIANTS), "variants")
        chosen, skipped = options.runnable(wanted, lambda name: obstacle(name, place.device, self.dtype))
        tokens = self.tokens or ["1,8,32" if is_tiny else "1,8,32,64,128,256,512"]
        job = DecodeJob(
            **common,
            tokens=tuple(options.integers(tokens, "tokens")),
            micro_batches=micro_batches,
            variants=chosen,
            dtype=self.dtype,
            context=self.context,
            routing=self.routing,
            num_iterations=self.iterations or (20 if is_tiny else 50),
        )
        return job, skipped


def decode(
    *,
    place: PlaceOptions,
    what: DecodeOptions,
    json: options.JsonFile = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show all figures of all variants.")] = False,
) -> None:
    """Measure the time per output token of a Qwen3-MoE shape with random weights, its experts distributed over ranks.

    Each rank has its own sequences, and a step computes one token of each. On CUDA a step is one CUDA graph, except of
    variants whose host must wait. Outputs are compared with those of a reference that computes all experts on one rank,
    before anything is timed; exit code 1 if they differ by more than rounding.

    On GPUs: fusco bench decode --device cuda --dtype fp8
    """
    check_fsdp("fusco bench decode", ("torch",))
    job, skipped = what.job(place)
    from fusco.bench.decode.rank import decode_rank
    from fusco.cpu.kernels.warm_up import warm_up_cpu

    place.run_there((warm_up_cpu,))
    console = new_console(json)
    begin_results(json, skipped)
    records = run_model(decode_rank, job, ("weights and caches (--layers, --context)", job.num_bytes), console, json)
    if records is None:
        return
    _print(job, records, skipped, console, explain=explain)
    report(records, [], console, None, _name)


_NAMES: tuple[Column, ...] = (("tokens\na rank", "{.tokens}"), ("micro-\nbatches", "{.micro_batches}"))


def _name(record: DecodeRecord) -> str:
    return f"{record.tokens} tokens in {record.micro_batches}, {record.variant}"


def _print(
    job: DecodeJob, records: Sequence[DecodeRecord], skipped: Mapping[str, str], console: Console, *, explain: bool
) -> None:
    from fusco.bench.decode.exchanges import VARIANTS
    from fusco.bench.decode.records import headline

    attention = f"attention to {job.context} tokens" if job.context else "without attention"
    title = (
        f"decode, {plural(job.num_ranks, 'rank')} on {job.device}, {job.dtype}, {attention}, {job.routing} routing: "
        f"{describe_shape(job.shape)}"
    )
    notes = (
        "a step: from idle ranks until the next token of every sequence is there, the slowest rank's time, median of "
        f"{job.num_iterations}",
        "errors: largest of a token, relative to its vector, against a reference with all experts on one rank",
        describe_origin(records[0], job.num_ranks),
    )
    case = case_of(_NAMES)
    fusco_ms = {case(record): record.tpot_ms for record in records if record.variant == "fusco"}

    def ratio(record: DecodeRecord) -> str:
        ms = fusco_ms.get(case(record))
        return f"{record.tpot_ms / ms:.2f}" if ms and record.tpot_ms else "-"

    columns: tuple[Column, ...] = (
        ("step\nms", timed("tpot_ms", "{.tpot_ms:,.3f}")),
        ("p99\nms", timed("tpot_ms", "{.p99_ms:,.3f}")),
        ("tokens\n/s", timed("tpot_ms", "{.tokens_per_s:,}")),
        ("this\n/ fusco", ratio),
        ("CUDA\ngraph", lambda record: "yes" if record.is_graph else "no"),
        ("error of\na layer", "{.layer_error:.1e}"),
        ("of a\nstep", "{.step_error:.1e}"),
        ("verified", lambda record: verified_cell(record.verified)),
    )
    if explain:
        console.print(table_of_variants(records, title, _NAMES, columns, notes))
    else:
        console.print(table_of_cases(records, title, _NAMES, "tpot_ms", notes))
    print_variants(console, VARIANTS, job.variants, skipped, explain=explain)
    console.print(conclusion(headline(records)), soft_wrap=True)
