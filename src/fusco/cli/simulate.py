"""``fusco simulate``: predicted times of collectives on a cluster, what binds, and what each part of fusco brings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.console import Console

from fusco.bench.harness.json_lines import write_json_lines
from fusco.bench.names import MOST_DRAWN_RANKS, REPLAYED, STDOUT, SYSTEMS, Pattern
from fusco.cli import options
from fusco.cli.reports import Comparison, least_gain, report
from fusco.cli.running import choose_shape, new_console, num_devices, tell_written
from fusco.cli.tables import ResultTable
from fusco.core.timeline import Span, write_chrome_trace

if TYPE_CHECKING:
    from fusco.bench.simulation.papers import PaperRow
    from fusco.simulate.cluster import Cluster
    from fusco.simulate.demand import Demand
    from fusco.simulate.result import SimulationResult


_DEFAULT_SYSTEMS = ("fusco", "no-lanes", "deepep", "nccl")
_MOST_FLUID_RANKS = 512
Traffic = Literal["trace", "uniform", "single-node", "imbalanced", "zipf", "one-rank", "one-prompt", "ragged", "skewed"]
ChosenTier = Literal["auto", "bound", "fluid", "slices"]
_NOTE = "[dim]predictions of a model: docs/simulation.md has its errors[/]"


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options that describe the cluster and the systems."""

    cluster: Annotated[
        str, typer.Option(help="Cluster: a name that comes with fusco, or a TOML file (docs/simulation.md).")
    ] = "h100x8"
    nodes: Annotated[
        list[str] | None, typer.Option(help="Nodes; several, with commas, are a sweep. Default: the cluster's.")
    ] = None
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks of a node. Default: the cluster's.")] = None
    systems: Annotated[
        list[str] | None,
        typer.Option(help=f"Systems to compare, with commas or repeated. Default: {', '.join(_DEFAULT_SYSTEMS)}."),
    ] = None
    tier: Annotated[
        ChosenTier,
        typer.Option(help="bound: busiest links; fluid: fair rates; slices: slice by slice. auto: fluid to 512 ranks."),
    ] = "auto"

    def clusters(self) -> list[Cluster]:
        """Return the cluster with each number of nodes."""
        from fusco.simulate.cluster import load_cluster

        loaded = load_cluster(self.cluster)
        if self.nodes is None:
            return [loaded.resized(None, self.ranks_per_node)]
        return [loaded.resized(number, self.ranks_per_node) for number in options.integers(self.nodes, "nodes")]

    def tier_of(self, num_ranks: int) -> Any:
        """Return the tier that answers for a number of ranks."""
        if self.tier != "auto":
            return self.tier
        return "fluid" if num_ranks <= _MOST_FLUID_RANKS else "bound"


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Files of the first system's results."""

    timeline: Annotated[Path | None, options.written_file("Write spans of the first system's ranks, for Perfetto.")] = (
        None
    )
    export: Annotated[
        Path | None,
        options.written_file(
            "Write the first system's dispatch for other simulators: .goal, .cm (htsim) or .et (Chakra)."
        ),
    ] = None


def simulate(
    *,
    of: ClusterOptions,
    traffic: Annotated[Traffic, typer.Option(help="Traffic; skewed: by law, for any number of ranks.")] = "uniform",
    workload: options.WorkloadOptions,
    sweep_tokens: Annotated[
        list[str] | None, typer.Option(help="Several numbers of tokens of a rank, with commas, in place of --tokens.")
    ] = None,
    sweep_skew: Annotated[
        list[str] | None,
        typer.Option(help="With --traffic zipf: exponents of Zipf's law, with commas; 0 is even, 1 the default."),
    ] = None,
    expert_bytes: Annotated[
        int, typer.Option(min=1, help="Weights of an expert, for replicas. Default: Qwen3-30B-A3B's in bfloat16.")
    ] = 9_437_184,
    check: Annotated[Literal["papers"] | None, typer.Option(help="Compare with published results instead.")] = None,
    measure: Annotated[Path | None, options.written_file("Under torchrun: write its cluster here.")] = None,
    device: Annotated[options.Device, typer.Option(help="Device that --measure measures.")] = "cpu",
    json: options.JsonFile = None,
    files: FileOptions,
) -> None:
    """Predict how long a dispatch and a combine take on a cluster, what binds, and what each part of fusco brings.

    Nothing is sent: the library's planner and schedule say what moves, and a model of links how long that takes.
    Every figure is a prediction; docs/simulation.md has the errors against published and measured results. With
    --check papers the exit code is 1 if one of these errors has moved by more than a point.
    """
    console = new_console(json)
    if check:
        _check_papers(console, json)
        return
    if measure:
        _measure(measure, of, device, console)
        return
    names = options.choose_names(of.systems or _DEFAULT_SYSTEMS, SYSTEMS, "systems")
    sizes = options.integers(sweep_tokens, "sweep-tokens") if sweep_tokens else [workload.tokens]
    if sweep_skew and traffic != "zipf":
        raise ValueError(f"--sweep-skew goes with --traffic zipf, not with {traffic}")
    skews = options.numbers(sweep_skew, "sweep-skew") if sweep_skew else [1.0]
    if files.export:
        from fusco.simulate.export import check_export

        check_export(files.export)
    workload.check([traffic])
    cases = [
        (cluster, demand_of_options(replace(workload, tokens=tokens), traffic, cluster, skew))
        for cluster in of.clusters()
        for tokens in sizes
        for skew in skews
    ]
    results = [each for cluster, demand in cases for each in _simulate(cluster, demand, names, of)]
    console.print(table_of_results(results))
    if len(cases) == 1:
        cluster, demand = cases[0]
        print_gains(cluster, demand, results[:2], of.tier_of(demand.topology.world_size), expert_bytes, console)
    if files.timeline:
        write_timeline(results[0], files.timeline)
        tell_written(console, files.timeline)
    if files.export:
        tell_written(console, *_export(*cases[0], names[0], files.export))
    write_json_lines(results, json)
    if json and json != STDOUT:
        tell_written(console, json)
    console.print(least_gain(compare_systems(results)), soft_wrap=True)


def _simulate(cluster: Cluster, demand: Demand, names: Sequence[str], of: ClusterOptions) -> Iterator[SimulationResult]:
    from fusco.simulate.run import simulate as simulate_one

    for name in names:
        for call in ("dispatch", "combine"):
            yield simulate_one(cluster, demand, name, call, of.tier_of(demand.topology.world_size))


def demand_of_options(workload: options.WorkloadOptions, traffic: str, cluster: Cluster, skew: float = 1.0) -> Demand:
    """Return what moves on a cluster; experts are made a multiple of its ranks unless a trace has them."""
    topology = cluster.topology
    has_law = traffic == "skewed" or (traffic == "uniform" and topology.world_size > MOST_DRAWN_RANKS)
    if topology.world_size > MOST_DRAWN_RANKS and not has_law:
        raise ValueError(
            f"--traffic {traffic} is for at most {MOST_DRAWN_RANKS} ranks; skewed and uniform are for any number"
        )
    from fusco.bench.simulation.laws import demand_of, drawn_demand  # it takes seconds, and sizes are right now

    if has_law:
        size = workload.hidden * (4 if workload.dtype == "float32" else 2)
        return drawn_demand(
            topology, workload.tokens, workload.num_topk, size, seed=workload.seed, is_skewed=traffic == "skewed"
        )
    if traffic not in REPLAYED and workload.num_experts % topology.world_size:
        experts = -(-workload.num_experts // topology.world_size) * topology.world_size
        workload = replace(workload, num_experts=experts)
    return demand_of(replace(workload.workloads([cast("Pattern", traffic)], topology)[0], skew=skew))


def _check_papers(console: Console, json: Path | None) -> None:
    from fusco.bench.simulation.papers import check_papers

    rows = list(check_papers())
    report(rows, [table_of_papers(rows)], console, json, lambda row: str(row.label))


def _measure(path: Path, of: ClusterOptions, device: str, console: Console) -> None:
    from fusco.bench.ranks.torchrun import launched, run_joined
    from fusco.bench.simulation.measure import measure_cluster
    from fusco.core.topology import Topology
    from fusco.simulate.cluster import write_cluster

    if not (job := launched()):
        raise ValueError("--measure measures the ranks of a job: run it under torchrun")
    nodes = options.integers(of.nodes, "nodes")[0] if of.nodes else None
    num_nodes, ranks_per_node = choose_shape(device, nodes, of.ranks_per_node, job, num_devices(device))
    topology = Topology.of_equal_nodes(num_nodes * ranks_per_node, ranks_per_node)
    clusters = run_joined(device, measure_cluster, topology, device)
    if clusters:
        write_cluster(replace(clusters[0], name=path.stem), path)
        console.print(", ".join(f"{name} {each.value:.4g}" for name, each in clusters[0].constants.items()))
        tell_written(console, path)


def _export(cluster: Cluster, demand: Demand, name: str, path: Path) -> list[Path]:
    from fusco.simulate.export import messages_of, write_export
    from fusco.simulate.systems import system

    program = system(name).build(demand, cluster, "dispatch")
    return write_export(messages_of(program, demand.topology.world_size), path)


def table_of_results(results: Sequence[SimulationResult]) -> ResultTable:
    """Return a table with a row for each system and size: dispatch, combine, what binds."""
    one = results[0]
    traffic = one.traffic if len({each.traffic for each in results}) == 1 else one.traffic.partition(" ")[0]
    title = f"predicted on {one.cluster}: {traffic}; {one.bytes_per_row:,} bytes a row; ms"
    names = ("system", "nodes x ranks", "tokens")
    has_skew = len({each.skew for each in results}) > 1
    skews = ("skew",) if has_skew else ()
    columns = (*names, *skews, "dispatch", "combine", "both", "busiest link alone", "tier", "busiest link")
    table = ResultTable(title, columns, (_NOTE,), left=(*names, "tier", "busiest link"))
    for dispatch, combine in zip(results[::2], results[1::2], strict=True):
        shape = [f"{dispatch.nodes} x {dispatch.ranks_per_node}", f"{dispatch.tokens:,}"]
        shape += [f"{dispatch.skew:g}"] if has_skew else []
        both = dispatch.makespan_ms + combine.makespan_ms
        times = [f"{each:.3f}" for each in (dispatch.makespan_ms, combine.makespan_ms, both, dispatch.bound_ms)]
        table.add_row(dispatch.system, *shape, *times, dispatch.tier, dispatch.binds)
    return table


def compare_systems(results: Sequence[SimulationResult]) -> list[Comparison]:
    """Compare the first system with the others, in each case."""
    first, cases = results[0].system, dict[str, dict[str, float]]()
    for dispatch, combine in zip(results[::2], results[1::2], strict=True):
        skew = "" if dispatch.skew is None else f", skew {dispatch.skew:g}"
        name = f"{dispatch.nodes} x {dispatch.ranks_per_node} ranks, {dispatch.tokens:,} tokens{skew}"
        if dispatch.system == first or not dispatch.system.startswith("no-"):  # without parts of fusco it is no rival
            cases.setdefault(name, {})[dispatch.system] = dispatch.makespan_ms + combine.makespan_ms
    return [Comparison(name, first, times, "predicted") for name, times in cases.items()]


def print_gains(
    cluster: Cluster,
    demand: Demand,
    results: Sequence[SimulationResult],
    tier: Any,
    expert_bytes: int,
    console: Console,
) -> None:
    """Print what binds the first system's calls, ``results``, and what each part of fusco brings."""
    from fusco.simulate.advice import defaults_used, describe_binding, gain_of_replicas, gains_of_parts

    for result in results:
        console.print(f"what binds {result.call} of {result.system}: {describe_binding(result)}")
    if defaults := defaults_used(results[0]):
        console.print(f"not given for {cluster.name}, so defaults: {', '.join(defaults)}")
    if demand.topology.num_nodes > 1:
        copies = results[0].copies
        each_way = f"{copies.needed:,} with a copy for each expert, {copies.bound:,} with one for each node"
        console.print(f"rows between nodes: {each_way}")
        table = ResultTable(
            "what each part brings, dispatch and combine, ms", ("part", "without", "with", "gain"), left=("part",)
        )
        for each in gains_of_parts(cluster, demand, tier):
            table.add_row(each.part, f"{each.without_ms:.3f}", f"{each.with_ms:.3f}", f"{each.gain:.2f} x")
        console.print(table)
    if replicas := gain_of_replicas(cluster, demand, expert_bytes):
        copies_of = f"{replicas.num_copies} cop{'y' if replicas.num_copies == 1 else 'ies'}"
        at, where = replicas.break_even_tokens, "within" if replicas.within_node else "between"
        console.print(
            f"replicas, a spare place for each rank: {copies_of}, busiest rank over mean "
            f"{replicas.busiest_over_mean_before:.2f} to {replicas.busiest_over_mean:.2f}; saves "
            f"{replicas.saved_ms:.3f} ms of products, weights take {replicas.weights_ms:.3f} ms {where} nodes; "
            + (f"break-even at {at:,} tokens of all ranks" if at else "copies save nothing")
        )


def table_of_papers(rows: Sequence[PaperRow]) -> ResultTable:
    """Return published results beside predictions; rows that constants were trained on are grey."""
    columns = ("result", "source", "unit", "published", "predicted", "error", "role")
    notes = ("[dim]grey: a constant was trained on it; ranges are represented by their middle[/]",)
    table = ResultTable("published results and predictions", columns, notes, left=("result", "source", "unit", "role"))
    for row in rows:
        cells = (
            row.label,
            row.where,
            row.unit,
            f"{row.measured:g}",
            f"{row.predicted:.2f}",
            f"{row.error:+.1f} %",
            row.role,
        )
        table.add_row(*(f"[dim]{cell}[/]" if row.role == "train" else cell for cell in cells))
    return table


def write_timeline(result: SimulationResult, path: Path) -> None:
    """Write the spans of a result's ranks in Chrome's trace format."""
    spans: list[list[Span]] = [[] for _ in range(result.ranks)]
    for each in result.spans:
        begin_us, end_us = each.start_ms * 1e3, each.end_ms * 1e3
        spans[each.rank].append(Span(each.name, each.name, begin_us, end_us - begin_us))
    write_chrome_trace(path, spans, {"what": result.title, "tier": result.tier})
