"""Views of simulations: JSON lines of ``fusco simulate``, each of which is one system and call."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fusco.cli.explore.traffic import MAX_CELLS, copies_of, experts_view, links_of, node_matrix
from fusco.cli.explore.views import (
    BalancerLoads,
    Constant,
    ConstantsView,
    CopiesView,
    ExpertsView,
    LinksView,
    MatrixView,
    ReplayView,
    Run,
    RunsView,
    Series,
    SweepView,
    TimelineView,
    View,
)
from fusco.cli.wording import duration, percent, ratio
from fusco.core.balance import Balance
from fusco.core.lanes import IntArray
from fusco.core.placement import ExpertPlacement

Result = Mapping[str, Any]
_CHOSEN = "lanes"  # the balancer of fusco's systems, unless they say no
_NIC = re.compile(r"nic-(out|in) of (rank|node) (\d+)")


def simulation_views(results: Sequence[Result], balance: Balance) -> list[View]:
    """Return the views of results: the times of all, and of one dispatch, fusco's if it is there, the rest.

    With a sweep, its times are a view of their own, and all others are of that dispatch's size.

    Views whose figures a result lacks are left out, as those over time with tier ``"bound"``.
    """
    one = next((each for each in results if (each["system"], each["call"]) == ("fusco", "dispatch")), results[0])
    sweep = sweep_view(results)
    same = ("traffic", "nodes", "ranks_per_node", "tokens")
    shown = [each for each in results if all(each[name] == one[name] for name in same)] if sweep else results
    views: list[View | None] = [
        sweep,
        runs_of(shown),
        _copies(one),
        _links(one),
        _matrix(one),
        _experts(one, balance),
        _timeline(one),
        _replay(one),
        _constants(one),
    ]
    return [view for view in views if view is not None]


def runs_of(results: Sequence[Result]) -> RunsView:
    """Return the time of each system: dispatch and combine, and the time of its busiest link alone."""
    calls: dict[tuple[str, str], dict[str, Result]] = {}
    for each in results:
        workload = f"{each['traffic']}, {each['nodes']} x {each['ranks_per_node']}, {each['tokens']:,} tokens"
        calls.setdefault((workload, each["system"]), {})[each["call"]] = each
    runs = []
    for (workload, system), of in calls.items():
        ms = {call: float(of[call]["makespan_ms"]) if call in of else 0.0 for call in ("dispatch", "combine")}
        copies = next(iter(of.values()))["copies"]
        row_bytes = next(iter(of.values()))["bytes_per_row"]
        runs.append(
            Run(
                workload=workload,
                variant=system,
                dispatch_ms=ms["dispatch"],
                combine_ms=ms["combine"],
                bound_ms=sum(float(each["bound_ms"]) for each in of.values()),
                internode_bytes=copies["sent"] * row_bytes,
                lower_bound_bytes=copies["bound"] * row_bytes,
                is_right=True,
                note="; ".join(f"{call}: {each['binds']} is busy for {_busy(each)}" for call, each in of.items()),
            )
        )
    one = results[0]
    return RunsView(
        anchor="systems",
        question="How long does it take?",
        title=comparison(runs),
        reading="Predicted time of the slowest rank, from the cluster's constants and each system's plan of this "
        "traffic.",
        machine=f"predicted for {one['cluster']}, tier {one['tier']}",
        runs=runs,
    )


def _busy(one: Result) -> str:
    return percent(float(one["bound_ms"]) / (float(one["makespan_ms"]) or 1.0)) + " of it"


def comparison(runs: Sequence[Run]) -> str:
    """Return how the first workload's fusco compares with the slowest other, in a sentence."""
    of_first = [run for run in runs if run.workload == runs[0].workload]
    total = {run.variant: run.dispatch_ms + run.combine_ms for run in of_first}
    first = "fusco" if "fusco" in total else of_first[0].variant
    slowest = max(total, key=lambda name: total[name])
    time = duration(total[first] * 1e3)
    if slowest == first or not total[first]:
        return f"{first} takes {time}" + (", the longest of all" if len(total) > 1 else "")
    longer = ratio(total[slowest] / total[first])
    return f"{first} takes {time}, {slowest} {longer} times as long"


def _copies(one: Result) -> CopiesView:
    copies = one["copies"]
    return copies_of(copies["needed"], copies["sent"], copies["bound"], one["tokens"], one["bytes_per_row"])


def _links(one: Result) -> LinksView | None:
    bound = one["nic_bound_bytes"] / one["bytes_per_row"]
    if not one["balancers"] or not bound:
        return None
    loads = []
    for name, of in one["balancers"].items():
        sends, receives = (
            [round(size / one["bytes_per_row"]) for size in of[way]] for way in ("send_bytes", "receive_bytes")
        )
        loads.append(
            BalancerLoads(
                name=name,
                is_chosen=name == _CHOSEN,
                sends=sends,
                receives=receives,
                over_bound=round(float(of["over_bound"]), 4),
                send_ratio=round(max(sends, default=0) / bound, 4),
                receive_ratio=round(max(receives, default=0) / bound, 4),
            )
        )
    return links_of(loads, bound, one["ranks_per_node"], one["bytes_per_row"])


def _matrix(one: Result) -> MatrixView | None:
    if one["nodes"] == 1 or not one["node_bytes_before"]:
        return None
    before, after = (
        np.array(one[name], np.int64) // one["bytes_per_row"] for name in ("node_bytes_before", "node_bytes_after")
    )
    for rows in (before, after):
        np.fill_diagonal(rows, 0)
    return node_matrix(before, after, one["ranks_per_node"], one["bytes_per_row"])


def _experts(one: Result, balance: Balance) -> ExpertsView | None:
    rows, by_rank = np.array(one["expert_rows"], np.int64), np.array(one["expert_rows_by_rank"], np.int64)
    if not len(by_rank):
        return None
    if len(rows) and len(rows) % one["ranks"] == 0:
        placement = ExpertPlacement.contiguous(len(rows), one["ranks"])
        if np.array_equal(_by_rank(rows, placement, one["ranks"]), by_rank):
            return experts_view([rows], placement, one["ranks"], balance, [0], one["ranks_per_node"])
    placement = ExpertPlacement.contiguous(one["ranks"], one["ranks"])  # of which only the ranks' rows are known
    return experts_view([by_rank], placement, one["ranks"], Balance(0), [0], one["ranks_per_node"])


def _by_rank(rows: IntArray, placement: ExpertPlacement, ranks: int) -> IntArray:
    return np.bincount(placement.expert_to_rank, weights=rows, minlength=ranks).astype(np.int64)


def _timeline(one: Result) -> TimelineView | None:
    spans = one["spans"]
    if not spans:
        return None
    kinds = list(dict.fromkeys(span["name"] for span in spans))
    last: dict[int, dict[int, float]] = {}  # when each rank of a lane ends
    has_nodes = one["ranks"] > MAX_CELLS
    for span in spans:
        lane = span["rank"] // one["ranks_per_node"] if has_nodes else span["rank"]
        ends = last.setdefault(lane, {})
        ends[span["rank"]] = max(ends.get(span["rank"], 0.0), span["end_ms"])
    shown = {max(ends, key=lambda rank: ends[rank]): lane for lane, ends in last.items()}
    lanes = {rank: i for i, rank in enumerate(sorted(shown))}
    spans = [span for span in spans if span["rank"] in lanes]
    slowest = max(spans, key=lambda span: float(span["end_ms"]))
    return TimelineView(
        anchor="time",
        question="What waits for what?",
        title=f"{duration(one['makespan_ms'] * 1e3)} in all, of which {one['binds']} alone needs "
        f"{duration(one['bound_ms'] * 1e3)}; rank {slowest['rank']} is last",
        reading=f"When each {'node (its slowest rank)' if has_nodes else 'rank'} packs, sends and unpacks in "
        f"{one['call']} by {one['system']}, predicted. The dashed line is the time of the busiest link alone.",
        lanes=[f"node {shown[rank]}" if has_nodes else f"rank {rank}" for rank in lanes],
        kinds=kinds,
        total_us=round(one["makespan_ms"] * 1e3, 3),
        bound_us=round(one["bound_ms"] * 1e3, 3),
        of_lane=[lanes[span["rank"]] for span in spans],
        of_kind=[kinds.index(span["name"]) for span in spans],
        begin_us=[round(span["start_ms"] * 1e3, 3) for span in spans],
        end_us=[round(span["end_ms"] * 1e3, 3) for span in spans],
        peer=[-1] * len(spans),
    )


def _replay(one: Result) -> ReplayView | None:
    samples = one["samples"]
    found = [_NIC.fullmatch(name) for name in samples["links"]] if samples else []
    ends = sorted({int(match[3]) for match in found if match})
    if not ends or not samples["gbs"]:
        return None
    end = next(match[2] for match in found if match)
    rates = np.zeros((2, len(samples["gbs"]), ends[-1] + 1))
    for column, match in enumerate(found):
        if match:
            rates[int(match[1] == "in"), :, int(match[3])] += [of_links[column] for of_links in samples["gbs"]]
    nics = [link["capacity_gbs"] for link in one["links"] if link["kind"] == "nic-out"]
    gbs = max(nics, default=float(rates.max())) * (one["ranks_per_node"] if end == "node" else 1)
    used = rates[0].sum(axis=1).mean() / (gbs * len(ends))
    return ReplayView(
        anchor="replay",
        question="What moves when?",
        title=f"All NICs together send {used:.0%} of what they could".replace("%", " %"),
        reading=f"Move the slider. Bars are what each {end} sends (up) and receives (down) between nodes, of "
        f"{gbs:g} GB/s, in steps of {duration(samples['step_ms'] * 1e3)}.",
        end="rank" if end == "rank" else "node",
        num_ends=ends[-1] + 1,
        end_gbs=gbs,
        total_us=round(len(samples["gbs"]) * samples["step_ms"] * 1e3, 3),
        step_us=samples["step_ms"] * 1e3,
        sends_gbs=rates[0].round(3).tolist(),
        receives_gbs=rates[1].round(3).tolist(),
    )


def _constants(one: Result) -> ConstantsView | None:
    if not one["constants"]:
        return None
    constants = [
        Constant(name=each["name"], value=each["value"], source=each["source"], trained=list(each["trained"]))
        for each in one["constants"]
    ]
    fitted = sum(bool(each.trained) for each in constants)
    defaults = sum(each.source.startswith("default") for each in constants)
    of = f"{len(constants)} constants of {one['cluster']}"
    return ConstantsView(
        anchor="constants",
        question="From which constants?",
        title=f"{fitted} of {of} were fitted to published results"
        if fitted
        else f"None of the {of} was fitted to a result, {defaults} are defaults",
        reading="What the simulator was given, and the results that a constant was fitted to: such results are no test "
        "of it.",
        constants=constants,
    )


def sweep_view(results: Sequence[Mapping[str, Any]]) -> SweepView | None:
    """Return the times of systems over what varies: nodes, else tokens a rank, else skew; ``None`` if none does.

    Results of one system and place on the axis are added: dispatch and combine.
    """
    axes: dict[str, Callable[[Mapping[str, Any]], float]] = {
        "nodes": lambda result: int(result["nodes"]),
        "tokens a rank": lambda result: round(result["tokens"] / result["ranks"]),
        "skew": lambda result: float(result.get("skew") or 0.0),
    }
    axis, of = next(((axis, of) for axis, of in axes.items() if len(set(map(of, results))) > 1), ("", None))
    if of is None:
        return None
    places = sorted(set(map(of, results)))
    times: dict[str, dict[float, float]] = {}
    for each in results:
        by_place = times.setdefault(each["system"], {})
        by_place[of(each)] = by_place.get(of(each), 0.0) + float(each["makespan_ms"])
    series = [Series(name=name, ms=[by_place.get(place) for place in places]) for name, by_place in times.items()]
    scale = " (Zipf's exponent)" if axis == "skew" else ", on a logarithmic axis"
    tiers = ", ".join(sorted({each["tier"] for each in results}))
    return SweepView(
        anchor="sweep",
        question="When does it pay?",
        title=_finding(series, places, axis),
        reading=f"Predicted time of dispatch and combine together over {axis}{scale}; tier {tiers}.",
        axis=axis,
        places=places,
        series=series,
    )


def _finding(series: Sequence[Series], places: Sequence[float], axis: str) -> str:
    """Return where the first system, fusco's if it is there, is the fastest of all."""
    first = next((each for each in series if each.name == "fusco"), series[0])
    others = [each for each in series if each is not first]
    unit, prefix = ("", "skew ") if axis == "skew" else (f" {axis}", "")
    if not others:
        return f"{first.name} from {prefix}{places[0]:,} to {places[-1]:,}{unit}"
    best = [min((ms for each in others if (ms := each.ms[i]) is not None), default=None) for i in range(len(places))]
    gains = [
        (other / own if own is not None and other is not None else None, place)
        for own, other, place in zip(first.ms, best, places, strict=True)
    ]
    known = [(gain, place) for gain, place in gains if gain is not None]
    if not known:
        return f"{first.name} and others over {axis}"
    slower = [f"{place:,}" for gain, place in known if gain < 1.0]
    gain, place = max(known)
    start = (
        f"{first.name} is not the fastest at {prefix}{', '.join(slower)}{unit}"
        if slower
        else f"None is faster than {first.name}"
    )
    if gain <= 1.0:
        return start
    return f"{start}; the next takes {ratio(gain)} times as long at {prefix}{place:,}{'' if slower else unit}"
