"""``fusco explore``: a page of a plan, of records of a benchmark, or of a simulation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusco.cli import options
from fusco.cli.running import new_console
from fusco.core.topology import Topology

if TYPE_CHECKING:
    from _typeshed import DataclassInstance  # exists for type checkers only

    from fusco.bench.inputs.traffic import Workload
    from fusco.cli.explore.views import View
    from fusco.core.balance import Balance
    from fusco.core.lanes import IntArray
    from fusco.schedule import Links

_SPARE_PLACES = 2
_OF_PAGE = ("--results", "--out", "--spare-places")  # options that go with results, too


def explore(
    context: typer.Context,
    *,
    results: Annotated[
        list[Path] | None,
        typer.Argument(
            exists=True,
            dir_okay=False,
            help="JSON lines of fusco bench shuffle, balance or balancers, or of fusco simulate. With options of a "
            "plan, its views follow theirs. Default: a plan alone.",
        ),
    ] = None,
    out: Annotated[Path, options.written_file("The page to write.", "--out", "-o")] = Path("plan.html"),
    nodes: options.Nodes = 8,
    ranks_per_node: options.RanksPerNode = 8,
    traffic: options.Pattern = "one-prompt",
    workload: options.WorkloadOptions,
    balancer: options.Balancer = "lanes",
    spare_places: options.SparePlaces = _SPARE_PLACES,
    latency_us: options.LatencyUs = 10.0,
    internode_gbs: options.InternodeGbs = 50.0,
) -> None:
    """Write a page that shows what moves where and why: one HTML file, which needs no network.

    Its views: copies avoided, traffic between ranks or nodes, loads of links with each balancer, experts' loads by rank
    and layer, stages over time, a replay; and what records or a simulation have.
    """
    from fusco.cli.explore.records import facts_of as record_facts, record_views, subtitle_of, title_of
    from fusco.cli.explore.views import Page, write_page
    from fusco.cli.wording import plural
    from fusco.core.balance import Balance
    from fusco.schedule import Links

    balance, views, title, subtitle, facts = Balance(spare_places), list[Any](), "", "", dict[str, str]()
    if results:
        records = [record for path in results for record in _read_lines(path)]
        if not records:
            raise ValueError(f"{', '.join(map(str, results))} has no records")
        views, facts = record_views(records, balance), record_facts(records)
        title, subtitle = title_of(records), subtitle_of(records)
    if not results or any(option not in _OF_PAGE for option in options.given_options(context)):
        topology = Topology.of_equal_nodes(nodes * ranks_per_node, ranks_per_node)
        (planned,) = workload.workloads([traffic], topology)
        layers = _layers_of(planned, workload) if planned.trace is not None else None
        links = Links(latency_us=latency_us, internode_gbs=internode_gbs)
        views += plan_views(planned, balancer, balance, links, layers)
        title = title or f"One dispatch on {plural(nodes, 'node')} of {plural(ranks_per_node, 'rank')}"
        facts, subtitle = facts or facts_of(planned), " ".join([subtitle, describe(planned)]).strip()
    write_page(Page(title=title, subtitle=subtitle, facts=facts, views=views, origin=_origin()), out)
    new_console().print(f"wrote {out}, {out.stat().st_size / 1e6:.1f} MB; open it in a browser", soft_wrap=True)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines; ``ValueError`` with the line that is none."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line or "{}")
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is no JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(  # noqa: TRY004  it is the file that is wrong
                f"{path}, line {number} has no JSON object, but {line[:40]}"
            )
        records += [record] if record else []
    return records


def plan_views(
    workload: Workload,
    balancer: str,
    balance: Balance | None = None,
    links: Links | None = None,
    layers: dict[int, IntArray] | None = None,
) -> list[View]:
    """Return the views of a workload's plan.

    ``layers`` has the rows of each expert by layer, by default one, of the workload's routing. Other defaults are those
    of ``fusco explore``.
    """
    import numpy as np

    from fusco.cli.explore.stages import stage_views
    from fusco.cli.explore.traffic import Dispatch, copies_view, experts_view, links_view, matrix_view
    from fusco.core.balance import Balance
    from fusco.schedule import Links

    topology, experts, views = workload.topology, workload.placement.num_experts, list[Any]()
    ids = [workload.routing(rank).topk_idx for rank in range(topology.world_size)]
    if topology.num_nodes > 1:
        dispatch = Dispatch.of_routings(ids, workload.placement, topology, workload.bytes_per_token)
        views += [copies_view(dispatch), links_view(dispatch, balancer), matrix_view(dispatch, balancer)]
    if topology.world_size > 1:
        layers = layers or {0: sum((_count(each.numpy(), experts) for each in ids), np.zeros(experts, np.int64))}
        sizes = (topology.world_size, balance or Balance(_SPARE_PLACES), list(layers), topology.ranks_per_node)
        views.append(experts_view(list(layers.values()), workload.placement, *sizes))
    if topology.num_nodes > 1:
        node_bytes = dispatch.node_rows * workload.bytes_per_token
        views += stage_views(node_bytes, topology.ranks_per_node, links or Links())
    return views


def _layers_of(workload: Workload, given: options.WorkloadOptions) -> dict[int, IntArray]:
    """Return the rows of each expert by layer, those of all tokens of the trace; ``--layer`` chooses one."""
    from fusco.bench.inputs.traffic import Trace

    num_experts = workload.placement.num_experts
    if given.layer is not None:
        traces = {given.layer: Trace.load(given.trace, given.trace_key, given.layer)}
    else:
        traces = dict(enumerate(Trace.load_all(given.trace, given.trace_key)))
    for each in traces.values():
        each.check(num_experts, workload.num_topk)
    return {layer: _count(each.topk_idx, num_experts) for layer, each in traces.items()}


def _count(ids: IntArray, num_experts: int) -> IntArray:
    import numpy as np

    return np.bincount(ids[ids >= 0], minlength=num_experts)


def facts_of(workload: Workload) -> dict[str, str]:
    """Return what the head of the page says of a workload."""
    topology = workload.topology
    tokens = [workload.num_tokens(rank) for rank in range(topology.world_size)]
    each = f"{min(tokens):,}" if min(tokens) == max(tokens) else f"{min(tokens):,} to {max(tokens):,}"
    return {
        "traffic": workload.pattern,
        "ranks": f"{topology.world_size:,}",
        "nodes": f"{topology.num_nodes:,}",
        "tokens a rank": each,
        "experts, top-k": f"{workload.placement.num_experts:,}, {workload.num_topk}",
        "bytes a row": f"{workload.bytes_per_token:,}",
    }


def describe(workload: Workload) -> str:
    """Return where the routing of a workload comes from, in a sentence."""
    if workload.trace is None:
        return f"Routing is drawn: {workload.pattern}, seed {workload.seed}."
    prompts = "Each rank has prompts of the Azure trace as they arrive; their" if workload.batch else "The"
    return f"{prompts} experts are those of {workload.trace.name}."


def write_records(records: Sequence[DataclassInstance], path: Path | None, more: Sequence[View] = ()) -> None:
    """Write a page of records, as ``--html`` asks for, and of ``more`` views; nothing without a path."""
    if path is None:
        return
    from fusco.cli.explore.records import facts_of as record_facts, record_views, title_of
    from fusco.cli.explore.views import Page, write_page
    from fusco.core.balance import Balance

    lines = json.loads(json.dumps([asdict(record) for record in records]))
    views = [*record_views(lines, Balance(_SPARE_PLACES)), *more]
    page = Page(title=title_of(lines), subtitle="", facts=record_facts(lines), views=views, origin=_origin())
    write_page(page, path)


def _origin() -> str:
    from fusco.bench.harness.environment import commit, versions

    made = commit()
    of = "" if made == "none" else f", commit {made}"
    return f"Made by fusco {versions()['fusco']}{of}. This file loads nothing."
