"""Names of the variants that ``fusco bench shuffle`` compares, and which of them are measured where.

The command line reads them, so this loads no torch; ``fusco.bench.shuffle.factory`` makes them.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Sequence
from typing import Any

# What each is, shown below tables.
VARIANTS = {
    "fusco": "output sized exactly",
    "fusco-static": "static rows",
    "fusco-graph": "static rows, in a CUDA graph",
    "fusco-fp8": "as fusco-graph, float8 values and their scales",
    "baseline": "all_to_all_single, index_select, and one pass that gathers and sums",
    "deep_ep": "DeepEP's Buffer (version 1), one index_select, one pass that gathers and sums",
    "deep_ep_v2": "DeepEP's ElasticBuffer (version 2), expanded, rows in order of arrival; one pass for weights",
    "deep_ep_v2-graph": "the same without a wait for counts, in a CUDA graph",
    "no-engine": "fusco's plan and balancer, by isend and irecv, all_to_all_single and index_select",
    "no-planner": "a copy of a token for each rank that needs it, through fusco; copies are made untimed, summed timed",
    "no-lanes": "as fusco, every rank sends its rows itself, by the balancer send-and-receive",
    "no-balancer": "as fusco, ranks of the same local rank forward for each other",
}
WITHOUT_LANES = "send-and-receive"  # a balancer by which every rank sends its rows

# FUSCO section 5.4, Table 3: what is left without the engine, the planner, lanes, the balancer.
ABLATION = ("no-engine", "no-planner", "no-lanes", "no-balancer")
# Of a library that may be installed; what cannot be set up is left out.
PEERS = ("deep_ep", "deep_ep_v2", "deep_ep_v2-graph")
# One copy of a token for each node that needs it, and no more.
DEDUPLICATED = ("fusco", "fusco-static", "no-engine", "no-lanes", "no-balancer")


def is_of_caller(variant: str) -> bool:
    """Return whether a variant is named by its importable function, such as ``"package.module:function"``."""
    return ":" in variant


def load_of_caller(variant: str) -> Any:
    """Return the function that a variant of the caller names; ``ValueError`` if there is none."""
    try:
        make = pkgutil.resolve_name(variant)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"variant {variant!r} cannot be imported: {error}; is its folder in PYTHONPATH?") from None
    if not callable(make):
        raise ValueError(f"variant {variant!r} is a {type(make).__name__}, not a function or a class")  # noqa: TRY004  of the command line
    return make


def has_fixed_messages(variant: str, device: str) -> bool:
    """Return whether a variant sends a row of every token to each other node, whatever the routing."""
    return device == "cuda" and variant in ("fusco-static", "fusco-graph")


def balancer_of(variant: str, balancer: str, device: str) -> str:
    """Return the name of the balancer that a variant uses in a run with ``balancer``.

    >>> [balancer_of(variant, "lanes", "cpu") for variant in ("fusco", "no-engine", "no-balancer")]
    ['lanes', 'send-and-receive', 'static']
    """
    if variant == "baseline" or is_of_caller(variant):
        return "none"
    if variant == "no-balancer" or has_fixed_messages(variant, device):
        return "static"
    is_without = variant == "no-lanes" or (variant == "no-engine" and balancer == "lanes")  # every rank sends its rows
    return WITHOUT_LANES if is_without else balancer


def choose_variants(
    device: str, num_nodes: int, selected: Sequence[str] = (), *, with_ablation: bool = False
) -> tuple[str, ...]:
    """Return the variants to measure, in order: those ``selected`` or else the default ones, then ``ABLATION``.

    Raises ``ValueError`` for a name that is not offered on the device (``"cpu"`` or ``"cuda"``) and number of nodes.

    >>> choose_variants("cuda", 2, with_ablation=True)
    ('fusco', 'fusco-static', 'fusco-graph', 'baseline', 'no-engine', 'no-planner', 'no-lanes', 'no-balancer')
    >>> choose_variants("cpu", 2, ["no-engine", "fusco"])
    ('no-engine', 'fusco')
    """
    default, others = _offered(device, num_nodes)
    if with_ablation and not set(ABLATION) <= {*default, *others}:
        raise ValueError(f"the ablation needs traffic between nodes, but there is {num_nodes} node: pass --nodes")
    for name in selected:
        if name not in (*default, *others) and not is_of_caller(name):
            where = f"{device} with {num_nodes} node{'s' if num_nodes > 1 else ''}"
            raise ValueError(
                f"variant {name!r} is not one of those on {where}: {', '.join((*default, *others))}; "
                "nor a function of yours, as package.module:function"
            )
    return tuple(dict.fromkeys((*(selected or default), *(ABLATION if with_ablation else ()))))


def recorded_variant(variants: Sequence[str]) -> str | None:
    """Return the variant that a timeline shows: with static rows, where nothing waits on the host, if possible."""
    return next((name for name in ("fusco-static", "fusco") if name in variants), None)


def _offered(device: str, num_nodes: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the default variants, and the others that can be selected."""
    ablation = ABLATION if num_nodes > 1 else ()
    if device == "cpu":
        return ("fusco", "baseline"), ("fusco-static", *ablation)
    if num_nodes > 1:
        return ("fusco", "fusco-static", "fusco-graph", "baseline"), ablation
    peers = PEERS if importlib.util.find_spec("deep_ep") else ()
    return ("fusco", "fusco-graph", "baseline", *peers, "fusco-fp8"), ("fusco-static",)
