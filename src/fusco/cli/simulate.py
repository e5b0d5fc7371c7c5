"""``fusco simulate``: predicted times of collectives on a cluster, what binds, and what each part of fusco brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fusco.bench.harness.json_lines import write_json_lines
from fusco.bench.names import REPLAYED
from fusco.cli import options
from fusco.cli.running import new_console
from fusco.cli.tables import ResultTable

if TYPE_CHECKING:
    from fusco.simulate import Cluster, Demand, SimulationResult

_DEFAULT_SYSTEMS = ("fusco", "no-lanes", "deepep", "nccl")
_MOST_FLUID_RANKS = 512
Traffic = Literal["trace", "uniform", "single-node", "imbalanced", "zipf", "one-rank", "one-prompt", "ragged", "skewed"]
ChosenTier = Literal["auto", "bound", "fluid", "slices"]


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
        ChosenTier, typer.Option(help="bound: busiest links; fluid: fair rates; slices: slice by slice.")
    ] = "auto"

    def clusters(self) -> list[Cluster]:
        """Return the cluster with each number of nodes."""
        from fusco.simulate import load_cluster

        loaded = load_cluster(self.cluster)
        if self.nodes is None:
            return [loaded.resized(None, self.ranks_per_node)]
        return [loaded.resized(number, self.ranks_per_node) for number in options.integers(self.nodes, "nodes")]

    def tier_of(self, num_ranks: int) -> Any:
        """Return the tier that answers for a number of ranks."""
        if self.tier != "auto":
            return self.tier
        return "fluid" if num_ranks <= _MOST_FLUID_RANKS else "bound"


@options.with_groups
def simulate(
    *,
    of: ClusterOptions,
    traffic: Annotated[Traffic, typer.Option(help="Traffic; skewed: by law, for any number of ranks.")] = "uniform",
    workload: options.WorkloadOptions,
    json: options.JsonFile = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, callback=options.check_writable, help="Write spans of ranks, as JSON for Perfetto."
        ),
    ] = None,
) -> None:
    """Predict how long a dispatch and a combine take on a cluster, and what binds.

    Nothing is sent: the library's planner and schedule say what moves, and a model of links how long that takes.
    Every figure is a prediction of a model; docs/simulation.md has its errors against published and measured results.
    """
    from fusco.simulate import simulate as simulate_one

    names = options.choose_names(of.systems or _DEFAULT_SYSTEMS, [], "systems")
    results: list[SimulationResult] = []
    for cluster in of.clusters():
        demand = demand_of_options(workload, traffic, cluster)
        for name in names:
            tier = of.tier_of(demand.topology.world_size)
            results += [simulate_one(cluster, demand, name, call, tier) for call in ("dispatch", "combine")]  # type: ignore[arg-type]
    console = new_console(json)
    console.print(table_of_results(results))
    if timeline:
        write_timeline(results[0], timeline)
    write_json_lines(results, json)


def demand_of_options(workload: options.WorkloadOptions, traffic: str, cluster: Cluster) -> Demand:
    """Return what moves on a cluster; experts are made a multiple of its ranks unless a trace has them."""
    from fusco.bench.simulation.laws import MOST_RANKS, demand_of, drawn_demand

    topology = cluster.topology
    if traffic == "skewed" or (traffic == "uniform" and topology.world_size > MOST_RANKS):
        size = workload.hidden * (4 if workload.dtype == "float32" else 2)
        return drawn_demand(
            topology, workload.tokens, workload.num_topk, size, seed=workload.seed, is_skewed=traffic == "skewed"
        )
    if topology.world_size > MOST_RANKS:
        raise ValueError(
            f"--traffic {traffic} is for at most {MOST_RANKS} ranks; skewed and uniform are for any number"
        )
    if traffic not in REPLAYED and workload.num_experts % topology.world_size:
        experts = -(-workload.num_experts // topology.world_size) * topology.world_size
        workload = type(workload)(**{**vars(workload), "num_experts": experts})
    return demand_of(workload.workloads([traffic], topology)[0])  # type: ignore[list-item]


def table_of_results(results: Sequence[SimulationResult]) -> ResultTable:
    """Return a table with a row for each system and size: dispatch, combine, what binds."""
    one = results[0]
    title = f"predicted on {one.cluster}: {one.traffic}; {one.bytes_per_row:,} bytes a row; ms"
    columns = ("system", "nodes x ranks", "dispatch", "combine", "both", "busiest link alone", "tier", "what binds")
    notes = ("[dim]predictions of a model: docs/simulation.md has its errors[/]",)
    table = ResultTable(title, columns, notes, left=("system", "nodes x ranks", "tier", "what binds"))
    for dispatch, combine in zip(results[::2], results[1::2], strict=True):
        shape = f"{dispatch.nodes} x {dispatch.ranks_per_node}"
        both = dispatch.makespan_ms + combine.makespan_ms
        times = [f"{each:.3f}" for each in (dispatch.makespan_ms, combine.makespan_ms, both, dispatch.bound_ms)]
        table.add_row(dispatch.system, shape, *times, dispatch.tier, dispatch.binds)
    return table


def write_timeline(result: SimulationResult, path: Path) -> None:
    """Write the spans of a result's ranks in Chrome's trace format."""
    from fusco.core.timeline import Span, write_chrome_trace

    spans: list[list[Span]] = [[] for _ in range(result.ranks)]
    for each in result.spans:
        begin_us, end_us = each.start_ms * 1e3, each.end_ms * 1e3
        spans[each.rank].append(Span(each.name, each.name, begin_us, end_us - begin_us))
    write_chrome_trace(path, spans, {"what": result.title, "tier": result.tier})
