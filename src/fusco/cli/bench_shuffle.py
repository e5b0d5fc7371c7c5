"""``fusco bench shuffle``: fusco and its alternatives, on processes, on GPUs, or on the ranks of a launched job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from rich.console import RenderableType

from fusco.bench import names
from fusco.bench.ranks.emulation import describe_emulation
from fusco.bench.shuffle.variants import VARIANTS, choose_variants, is_of_caller, load_of_caller, recorded_variant
from fusco.cli import options
from fusco.cli.explore.command import plan_views
from fusco.cli.reports import headlines, report
from fusco.cli.running import check_room, new_console, num_devices, run_on_ranks, tell_written
from fusco.cli.tables import shape_of
from fusco.cli.testbed import PlaceOptions
from fusco.core.timeline import write_chrome_trace

if TYPE_CHECKING:
    from fusco.bench.inputs.traffic import Workload
    from fusco.bench.shuffle.run import ShuffleRun


def _defaults(device: str, num_nodes: int) -> str:
    return ", ".join(choose_variants(device, num_nodes))


@dataclass(frozen=True, kw_only=True)
class ShuffleOptions:
    """Options that say what is compared and how, and the run that they describe."""

    balancer: Annotated[
        options.BalancerName | None,
        typer.Option(help="Balancer of the rows between nodes. Default: lanes; on CUDA send-and-receive."),
    ] = None
    variants: Annotated[
        list[str] | None,
        typer.Option(
            help="Variants to compare, with commas or repeated; your own as package.module:function. "
            f"Default: {_defaults('cpu', 2)}; on CUDA {_defaults('cuda', 1)}, between nodes {_defaults('cuda', 2)}."
        ),
    ] = None
    ablation: Annotated[
        bool, typer.Option("--ablation", help="Also without the engine, planner, lanes, balancer (FUSCO, 5.4).")
    ] = False
    slice_bytes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Bytes of one message between nodes. Default: 1 MiB, on CUDA 16 MiB for all nodes together."
        ),
    ] = None
    ring_depth: options.RingDepth = 4
    slice_order: Annotated[
        Literal["in-turn", "staged"], typer.Option(help="Order of the nodes that a rank sends to.")
    ] = "in-turn"
    timeout_s: options.Timeout = 60.0
    num_sms: Annotated[
        int | None, typer.Option(min=1, help="On CUDA: SMs that fusco may take. Default: its own choice.")
    ] = None
    iterations: options.Iterations = 20
    timeline: Annotated[
        Path | None,
        options.written_file(
            "Also record a timeline of one dispatch and combine, as JSON for Perfetto. "
            "With several kinds of traffic a file for each, with its name before the suffix."
        ),
    ] = None

    def check_names(self) -> None:
        """Raise ``ValueError`` for a variant that there is nowhere."""
        for name in options.choose_names(self.variants, [], "variants") if self.variants else ():
            if name not in VARIANTS and not is_of_caller(name):
                raise ValueError(
                    f"variant {name!r} is not one of {', '.join(VARIANTS)}; nor a function of yours, as "
                    f"package.module:function"
                )

    def run(self, workloads: tuple[Workload, ...], place: PlaceOptions) -> ShuffleRun:
        """Return the run; ``ValueError`` if options do not fit together."""
        from fusco.bench.shuffle.run import ShuffleRun
        from fusco.core.config import Settings
        from fusco.planner.balancer import DEFAULT_BALANCERS

        selected = options.choose_names(self.variants, [], "variants")
        num_nodes = workloads[0].topology.num_nodes
        variants = choose_variants(place.device, num_nodes, selected, with_ablation=self.ablation)
        for variant in filter(is_of_caller, variants):
            load_of_caller(variant)
        if self.timeline and recorded_variant(variants) is None:
            raise ValueError(f"--timeline shows fusco or fusco-static, but the variants are {', '.join(variants)}")
        return ShuffleRun(
            workloads=workloads,
            variants=variants,
            settings=Settings(
                slice_bytes=self.slice_bytes,
                ring_depth=self.ring_depth,
                timeout_s=self.timeout_s,
                slice_order=self.slice_order,
            ),
            balancer=self.balancer or DEFAULT_BALANCERS[place.device],
            num_iterations=self.iterations,
            device=place.device,
            num_sms=self.num_sms,
            has_timeline=self.timeline is not None,
            rank_gbs=place.rank_gbs,
        )


def shuffle(
    *,
    place: PlaceOptions,
    traffic: options.Patterns = ("trace",),  # type: ignore[assignment]  # typer makes a list of it
    workload: options.WorkloadOptions,
    batches: options.Batches = 1,
    how: ShuffleOptions,
    json: options.JsonFile = None,
    html: options.HtmlFile = None,
) -> None:
    """Compare fusco with all_to_all_single and index_select: verify, then time dispatch and combine.

    Ranks are processes of this machine, on CUDA one for each GPU, that emulate the given nodes; or, under torchrun,
    its ranks. On a testbed (--testbed) they have a host and a network, whose rate the results are compared with. Every
    variant is verified first: dispatched rows bit for bit, combined rows within rounding. Exit code 1 if a variant is
    wrong, or if fusco sends more or fewer bytes between nodes than it must.
    """
    patterns: list[Any] = options.choose_names(traffic, get_args(names.Pattern), "traffic")
    if how.num_sms is not None and place.device != "cuda":
        raise ValueError("--num-sms needs --device cuda")
    how.check_names()
    workload.check(patterns)
    from fusco.bench.inputs.traffic import world_bytes  # it takes seconds, and names are right now
    from fusco.cpu.kernels.warm_up import warm_up_cpu

    topology, device = place.topology(), place.device
    workloads = workload.workloads(patterns, topology, batches)
    if batches > 1 and (device == "cuda" or len(workloads) == len(patterns)):
        raise ValueError(f"--batches {batches} goes with --traffic one-prompt or ragged, on the CPU")
    run = how.run(workloads, place)
    from fusco.bench.shuffle.ranks import run_rank  # it takes long, and options are right now
    from fusco.cli.shuffle_tables import table_of_records

    place.run_there((warm_up_cpu,))
    where: dict[str, Any] = {"device": device, "topology": topology}
    if device == "cpu":
        what = "all ranks' rows (--tokens, --hidden), which each rank rebuilds for verification,"
        check_room(what, world_bytes(run.shape), topology.world_size)
        where["prepare"] = (warm_up_cpu,)
    console = new_console(json)
    ranks = run_on_ranks(run_rank, (run,), topology.world_size, console, **where)
    if ranks is None:
        return  # rank 0 of the launched job has the results
    records = _summarize(run, ranks)
    if how.timeline:
        tell_written(console, *_write_timelines(run, ranks, how.timeline))
    tables = [table_of_records(list(of)) for _, of in groupby(records, key=lambda record: record.traffic)]
    views = plan_views(run.workloads[0], run.balancer) if html else ()
    shown: list[RenderableType] = [*tables, *headlines(records, "total_ms", lambda record: f"{record.traffic} traffic")]
    report(records, shown, console, json, lambda record: f"{record.traffic}, {record.variant}", html, views)


def _summarize(run: ShuffleRun, ranks: Sequence[Any]) -> list[Any]:
    from fusco.bench.ranks.torchrun import launched
    from fusco.bench.shuffle.summary import summarize

    is_emulated = run.device == "cuda" and not launched()
    emulation = describe_emulation(run.topology, os.environ, num_devices(run.device)) if is_emulated else ""
    return summarize(run, ranks, emulation)


def _write_timelines(run: ShuffleRun, ranks: Sequence[Sequence[Any]], path: Path) -> list[Path]:
    from fusco.bench.harness.environment import commit

    targets = []
    for i, workload in enumerate(run.workloads):
        traffic = workload.pattern
        target = path if len(run.workloads) == 1 else path.with_name(f"{path.stem}.{traffic}{path.suffix}")
        about = {
            "what": f"one dispatch and combine of {recorded_variant(run.variants)}",
            "shape": f"{shape_of(run.topology.num_nodes, run.topology.ranks_per_node)}, {workload.tokens} tokens "
            f"a rank, hidden {workload.hidden}, top-{workload.num_topk} of {workload.placement.num_experts}, {traffic}",
            "commit": commit(),
        }
        write_chrome_trace(target, [results[i].spans for results in ranks], about)
        targets.append(target)
    return targets
