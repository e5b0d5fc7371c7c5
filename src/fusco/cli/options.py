"""Options that several commands share, and the workload they describe."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fusco.bench.traffic import Workload


class Traffic(str, Enum):
    """The names of ``fusco.bench.traffic.Pattern``, here so that help need not load torch; a test compares them."""

    TRACE = "trace"
    UNIFORM = "uniform"
    SINGLE_NODE = "single-node"
    IMBALANCED = "imbalanced"
    ZIPF = "zipf"
    ONE_RANK = "one-rank"
    ONE_EXPERT = "one-expert"


class BalancerName(str, Enum):
    """The names of ``fusco.BALANCERS``; a test compares them."""

    STATIC = "static"
    ROTATION = "rotation"
    SEND_AND_RECEIVE = "send-and-receive"


class RowDtype(str, Enum):
    """Dtypes of rows."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


Nodes = Annotated[int, typer.Option(min=1, help="Nodes to play on this machine.")]
RanksPerNode = Annotated[int, typer.Option(min=1, help="Ranks of each node.")]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens of each rank.")]
Hidden = Annotated[int, typer.Option(min=1, help="Elements of a row.")]
NumExperts = Annotated[int, typer.Option(min=1, help="Experts of all ranks together.")]
NumTopk = Annotated[int, typer.Option(min=1, help="Experts of a token.")]
Dtype = Annotated[RowDtype, typer.Option(help="Dtype of rows.")]
Pattern = Annotated[Traffic, typer.Option("--traffic", help="Where tokens go (FUSCO, section 5.2).")]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        exists=True,
        dir_okay=False,
        help="Routing to replay: npz or npy of ids (tokens, layers, topk). Default: the Qwen3-30B-A3B trace shipped.",
    ),
]
TraceKey = Annotated[str | None, typer.Option(help="Which array of an npz trace.")]
Layer = Annotated[int, typer.Option(min=0, help="Which layer of the trace.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of rows, weights and synthetic traffic.")]
Balancer = Annotated[BalancerName, typer.Option(help="Who forwards for whom.")]
JsonFile = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Also write JSON lines here.")]


def make_workload(  # the options of a command, as they are
    *,
    traffic: Traffic,
    nodes: int,
    ranks_per_node: int,
    tokens: int,
    hidden: int,
    num_experts: int,
    num_topk: int,
    dtype: RowDtype,
    trace: Path | None,
    trace_key: str | None,
    layer: int,
    seed: int,
) -> Workload:
    """The workload that options describe; ``ValueError`` where they do not go together."""
    import torch

    from fusco.bench.traffic import Pattern as TrafficPattern
    from fusco.bench.traffic import Trace, Workload
    from fusco.placement import ExpertPlacement
    from fusco.topology import Topology

    pattern = TrafficPattern(traffic.value)
    if pattern is not TrafficPattern.TRACE and trace is not None:
        raise ValueError(f"--trace goes with --traffic trace, not with {traffic.value}")
    world_size = nodes * ranks_per_node
    return Workload(
        pattern=pattern,
        topology=Topology.of_equal_nodes(world_size, ranks_per_node),
        placement=ExpertPlacement.contiguous(num_experts, world_size),
        tokens=tokens,
        hidden=hidden,
        num_topk=num_topk,
        dtype=getattr(torch, dtype.value),
        seed=seed,
        trace=Trace.load(trace, trace_key, layer) if pattern is TrafficPattern.TRACE else None,
    )
