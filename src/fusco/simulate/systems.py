"""Systems by name: what each does with the rows of a dispatch or a combine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fusco.simulate import exchanges
from fusco.simulate.cluster import Cluster
from fusco.simulate.demand import Demand
from fusco.simulate.flows import Program
from fusco.simulate.forwarding import Call, Forwarding

Build = Callable[[Demand, Cluster, Call], Program]


@dataclass(frozen=True, kw_only=True)
class System:
    """A system: one line that says what it is, and the function that returns its program."""

    about: str
    build: Build
    has_duplicates: bool = False
    balancer: str | None = None


def _forwarding(about: str, **fields: object) -> System:
    forwarding = Forwarding(**fields)  # type: ignore[arg-type]
    return System(about=about, build=forwarding.program, balancer=forwarding.balancer)


def _exchange(about: str, build: Build) -> System:
    return System(about=about, build=build, has_duplicates=True)


_PAPER = {"copies": "experts", "is_pipelined": False}
SYSTEMS: dict[str, System] = {
    "fusco": _forwarding("fusco with lanes, the default on the CPU", balancer="lanes"),
    "no-lanes": _forwarding("as fusco, every rank sends its rows: the default on CUDA", balancer="send-and-receive"),
    "rotation": _forwarding("as fusco, with the balancer of FUSCO's Algorithm 1", balancer="rotation"),
    "no-balancer": _forwarding("as fusco, ranks of the same local rank forward", balancer="static"),
    "no-engine": _forwarding(
        "as no-lanes, in two collectives with passes over memory",
        balancer="send-and-receive",
        is_pipelined=False,
        passes="all",
    ),
    "no-planner": _exchange("a copy for each expert, directly to its rank, no passes over memory", exchanges.direct),
    "fusco-paper": _forwarding("FUSCO as published: rotation, two collectives in turn", balancer="rotation", **_PAPER),
    "fusco-paper-no-balancer": _forwarding("Table 3's balancer-off", balancer="static", **_PAPER),
    "fusco-paper-no-engine": _forwarding("Table 3's dComm-off", balancer="rotation", passes="all", **_PAPER),
    "fusco-paper-no-planner": _exchange("Table 3's planner-off", exchanges.direct),
    "nccl": _exchange("all_to_all_single with PXN, a pass before and one after", exchanges.nccl),
    "deepep": _forwarding(
        "DeepEP: the same local rank forwards, one pass after", balancer="static", is_pipelined=False, passes="after"
    ),
    "direct-pxn": _exchange(
        "all messages at once, each by the NIC of its receiver's local rank", partial(exchanges.direct, has_pxn=True)
    ),
    "fast": _exchange("FAST, which fusco.all_to_all follows: balance, stages, redistribute", exchanges.fast),
    "spread-out": _exchange("MPI's shifted diagonals, one message at a time", exchanges.spread_out),
    "padded": _exchange("every message as long as the longest (TACCL)", exchanges.padded),
    "direct": _exchange("all messages at once, each by its rank (gloo)", exchanges.direct),
}


def system(name: str) -> System:
    """Return a system; ``ValueError`` for a name that is none."""
    if name not in SYSTEMS:
        raise ValueError(f"system {name!r} is not one of {', '.join(SYSTEMS)}")
    return SYSTEMS[name]
