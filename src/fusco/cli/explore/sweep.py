"""View of a sweep: the time of each system over the number of nodes, of tokens, or the skew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fusco.cli.explore.views import Series, SweepView
from fusco.cli.wording import ratio


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
