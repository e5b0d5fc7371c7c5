"""Views of records of benchmarks, as their JSON lines have them, and of predictions beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from fusco.cli.explore.simulation import comparison, simulation_views
from fusco.cli.explore.traffic import about_experts, links_of
from fusco.cli.explore.views import (
    BalancerLoads,
    ExpertsView,
    LinksView,
    Prediction,
    PredictionsView,
    Run,
    RunsView,
    View,
)
from fusco.cli.wording import percent
from fusco.core.balance import Balance

Record = Mapping[str, Any]


def record_views(records: Sequence[Record], balance: Balance) -> list[View]:
    """Return the views of JSON lines of any kind that is known, whatever their order.

    ``balance`` is for the experts of simulations. Raises ``ValueError`` for a record of an unknown kind.
    """
    kinds: dict[str, list[Record]] = {}
    for record in records:
        kinds.setdefault(_kind(record), []).append(record)
    views: list[View] = []
    if timed := kinds.get("variant"):
        views.append(variant_runs(timed))
    simulated = kinds.get("simulation", [])
    rows = [_prediction(each) for each in kinds.get("prediction", [])]
    if rows := rows + _predicted_of(simulated, kinds.get("variant", [])):
        views.append(predictions_view(rows))
    if simulated:
        views += simulation_views(simulated, balance)
    views += _balancers(kinds.get("balancer", []))
    return views + _layers(kinds.get("balance", []))


def facts_of(records: Sequence[Record]) -> dict[str, str]:
    """Return what the head of the page says of records: of the first of them that knows the ranks."""
    one = next((each for each in records if "nodes" in each), None)
    if one is None:
        return {}
    facts = {"cluster": one["cluster"]} if "cluster" in one else {}
    names = {"nodes": "nodes", "ranks_per_node": "ranks a node"}
    if "traffic" in one:
        facts["traffic"] = one["traffic"].partition(":")[0]
    same = [each for each in records if _kind(each) == _kind(one)]
    facts |= {label: _span([each[name] for each in same]) for name, label in names.items() if name in one}
    tokens = "all_tokens" if "all_tokens" in one else "tokens" if "cluster" in one else ""
    return facts | ({"tokens of all ranks": _span([each[tokens] for each in same])} if tokens else {})


def _span(values: Sequence[int]) -> str:
    """Return a value, or the least and the greatest.

    >>> _span([8, 8]), _span([8, 1024, 32])
    ('8', '8 to 1,024')
    """
    return f"{min(values):,}" + (f" to {max(values):,}" if max(values) > min(values) else "")


def subtitle_of(records: Sequence[Record]) -> str:
    """Return what the page's head says below the title."""
    one = next((record for record in records if _kind(record) == "simulation"), None)
    if one is None:
        return ""
    law = one["traffic"].partition(": ")[2]
    return "Predicted by a model, not measured." + (f" Traffic by law: {law}." if law else "")


def title_of(records: Sequence[Record]) -> str:
    """Return the heading of a page of records."""
    kinds = {_kind(record) for record in records}
    if kinds == {"simulation"}:
        return f"What {records[0]['cluster']} would do"
    if len(kinds) > 1:
        return "Predicted and measured"
    return {
        "variant": "Measured on ranks",
        "balance": "Work of ranks, with and without copies",
        "balancer": "What balancers leave",
        "prediction": "Predicted beside measured",
    }[kinds.pop()]


def _kind(record: Record) -> str:
    if "kind" in record and record["kind"] in ("simulation", "prediction"):
        return str(record["kind"])
    for kind, fields in (
        ("variant", {"variant", "dispatch_ms"}),
        ("balance", {"busiest_over_mean_before", "layer"}),
        ("balancer", {"balancer", "busiest_ratio"}),
    ):
        if fields <= set(record):
            return kind
    raise ValueError(f"no view shows a record with the fields {', '.join(list(record)[:6])}, ...")


def variant_runs(records: Sequence[Record]) -> RunsView:
    """Return the times of the variants of ``fusco bench shuffle``; those that were not timed are left out."""
    timed = [record for record in records if record["dispatch_ms"] is not None and record["combine_ms"] is not None]
    if not timed:
        raise ValueError(f"none of the {len(records)} variants was timed")
    runs = [
        Run(
            workload=record["traffic"] + (f", batch {record['batch']}" if _is_batch(record, timed) else ""),
            variant=record["variant"],
            dispatch_ms=record["dispatch_ms"],
            combine_ms=record["combine_ms"],
            bound_ms=2 * record["bound_ms"] if record.get("bound_ms") else None,
            internode_bytes=record.get("internode_row_bytes"),
            lower_bound_bytes=record.get("internode_row_bytes_lower_bound"),
            is_right=record["verified"],
            note="" if record["verified"] else "wrong",
        )
        for record in timed
    ]
    one = timed[0]
    where = one["hardware"]
    return RunsView(
        anchor="measured",
        question="How long did it take?",
        title=comparison(runs),
        reading=f"Measured medians of {one['num_iterations']} iterations, of the slowest rank: dispatch, then combine. "
        "Every variant was verified before it was timed.",
        machine=f"measured on {where.get('gpu', where['cpu'])}, {one['nodes']} nodes x {one['ranks_per_node']} ranks",
        runs=runs,
    )


def _is_batch(record: Record, records: Sequence[Record]) -> bool:
    same = [each for each in records if (each["traffic"], each["variant"]) == (record["traffic"], record["variant"])]
    return len(same) > 1


def predictions_view(rows: Sequence[Prediction]) -> PredictionsView:
    """Return predictions beside measurements; those that constants were fitted to are no test, and come last."""
    held_out = [abs(row.predicted / row.measured - 1) for row in rows if row.role == "test" and row.measured]
    title = f"{len(rows)} predictions, all of results that constants were fitted to"
    if held_out:
        title = f"Held-out results are predicted within {percent(max(held_out))}"
    return PredictionsView(
        anchor="predictions",
        question="May one believe it?",
        title=title,
        reading="Predicted beside measured. Grey rows were fitted to; all others were not seen by any constant.",
        rows=sorted(rows, key=lambda row: row.role == "train"),
    )


def _prediction(record: Record) -> Prediction:
    fields = ("label", "role", "unit", "predicted", "measured")
    return Prediction(**{name: record[name] for name in fields})


def _predicted_of(simulated: Sequence[Record], measured: Sequence[Record]) -> list[Prediction]:
    """Return a row for each call of a variant that was simulated, as a system of its name, and measured."""
    if not simulated or not measured:
        return []
    shape = ("traffic", "nodes", "ranks_per_node")
    times = {
        (*(each[name] for name in shape), each["variant"], call): each[f"{call}_ms"]
        for each in measured
        for call in ("dispatch", "combine")
    }
    rows = []
    for each in simulated:
        key = (*(each[name] for name in shape), each["system"], each["call"])
        if times.get(key) is not None:
            label = f"{each['system']}, {each['call']}, {each['traffic']}"
            predicted = float(each["makespan_ms"])
            rows.append(Prediction(label=label, role="test", unit="ms", predicted=predicted, measured=times[key]))
    return rows


def _balancers(records: Sequence[Record]) -> list[LinksView]:
    """Return what ``fusco bench balancers`` found, one view for each shape."""
    views = []
    for (nodes, ranks), of in groupby(records, key=lambda each: (each["nodes"], each["ranks_per_node"])):
        loads = [
            BalancerLoads(
                name=each["balancer"],
                is_chosen=each["balancer"] == "lanes",
                over_bound=each["busiest_ratio"],
                send_ratio=each["send_ratio"],
                receive_ratio=each["receive_ratio"],
            )
            for each in of
        ]
        made = links_of(loads, 0.0, ranks, 0)
        about = {"anchor": f"links-{nodes}-{ranks}", "question": f"{nodes} x {ranks}", "title": made.title}
        reading = f"Medians over draws of {nodes} nodes of {ranks} ranks: the busiest rank's rows over the bound."
        views.append(LinksView(**{**vars(made), **about, "reading": reading}))
    return views


def _layers(records: Sequence[Record]) -> list[ExpertsView]:
    """Return what ``fusco bench balance`` found, one view for each number of ranks."""
    views = []
    for ranks, group in groupby(records, key=lambda each: each["ranks"]):
        of = list(group)
        layers, spare_places = [each["layer"] for each in of], of[0]["spare_places"]
        before = [each["busiest_over_mean_before"] for each in of]
        after = [each["busiest_over_mean_after"] for each in of]
        about = about_experts(before, after, layers, spare_places)
        about |= {"anchor": f"experts-{ranks}", "question": f"{ranks} ranks"}
        views.append(
            ExpertsView(
                **about,
                spare_places=spare_places,
                layers=layers,
                before=[],
                after=[],
                ratio_before=before,
                ratio_after=after,
                copies=[round(each["experts_copied_per_rank"] * ranks) for each in of],
            )
        )
    return views
