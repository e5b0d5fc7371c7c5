"""The names of what ``fusco bench shuffle`` compares, and which of them are measured where."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

# FUSCO section 5.4, Table 3: what is left without the engine, without the planner, without the balancer.
ABLATION = ("no-engine", "no-planner", "no-balancer")
# One copy of a token for each node that wants it, and no more.
DEDUPLICATED = ("fusco", "fusco-static", "no-engine", "no-balancer")

WHAT = {
    "fusco": "output sized exactly",
    "fusco-static": "static rows",
    "fusco-graph": "static rows, in a CUDA graph",
    "fusco-in-place": "as fusco-graph, with rows where peers can read them",
    "fusco-fp8": "as fusco-graph, float8 values and their scales",
    "baseline": "all_to_all_single and index_select",
    "deep_ep": "DeepEP's normal kernels and index_select",
    "no-engine": "fusco's plan and balancer, by isend and irecv, all_to_all_single and index_select",
    "no-planner": "a copy of a token for each rank that wants it, through fusco; copies are made untimed, summed timed",
    "no-balancer": "as fusco, ranks of the same local rank forward for each other",
}


def choose_variants(
    device: str, num_nodes: int, selected: Sequence[str] = (), *, with_ablation: bool = False
) -> tuple[str, ...]:
    """Which variants to measure, in order.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        num_nodes: how many nodes there are.
        selected: names, if not the usual ones.
        with_ablation: add ``ABLATION``.

    Raises:
        ValueError: for a name that means nothing there.

    >>> choose_variants("cuda", 2, with_ablation=True)
    ('fusco', 'fusco-static', 'baseline', 'no-engine', 'no-planner', 'no-balancer')
    >>> choose_variants("cpu", 2, ["no-engine", "fusco"])
    ('no-engine', 'fusco')

    """
    usual, others = _offered(device, num_nodes)
    if with_ablation and not set(ABLATION) <= {*usual, *others}:
        raise ValueError(f"the ablation is about what crosses between nodes, but there is {num_nodes}: pass --nodes")
    for name in selected:
        if name not in (*usual, *others):
            where = f"{device} with {num_nodes} node{'s' if num_nodes > 1 else ''}"
            raise ValueError(f"variant {name!r} is none of those on {where}: {', '.join((*usual, *others))}")
    return tuple(dict.fromkeys((*(selected or usual), *(ABLATION if with_ablation else ()))))


def recorded_variant(variants: Sequence[str]) -> str | None:
    """Which variant a timeline shows: with static rows, where nothing waits on the host, if there is a choice."""
    return next((name for name in ("fusco-static", "fusco") if name in variants), None)


def _offered(device: str, num_nodes: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is measured unless told otherwise, and what else can be."""
    ablation = ABLATION if num_nodes > 1 else ()
    if device == "cpu":
        return ("fusco", "baseline"), ("fusco-static", *ablation)
    if num_nodes > 1:
        return ("fusco", "fusco-static", "baseline"), ablation
    peers = ("deep_ep",) if importlib.util.find_spec("deep_ep") else ()
    return ("fusco", "fusco-graph", "fusco-in-place", "baseline", *peers, "fusco-fp8"), ("fusco-static",)
