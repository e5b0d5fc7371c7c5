"""Options that several commands share, also as dataclasses among their parameters, and the workload they describe."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args, get_type_hints

import typer

from fusco.bench import names
from fusco.core.topology import Topology

if TYPE_CHECKING:
    from fusco.bench.inputs.prompts import Batch
    from fusco.bench.inputs.traffic import Workload


Device = Literal["cpu", "cuda"]
# The names of ``fusco.BALANCERS``; a test compares them.
BalancerName = Literal["lanes", "static", "rotation", "send-and-receive"]
_NUM_LAYERS = 48  # of the trace that comes with fusco

RowDtype = Literal["bfloat16", "float16", "float32"]


def check_writable(path: Path | None) -> Path | None:
    """Check that a file can be written, before hours are spent on its contents."""
    if path is None:
        return None
    place = path if path.exists() else path.parent
    if not place.exists():
        raise typer.BadParameter(f"there is no directory {place}")
    if not os.access(place, os.W_OK):
        raise typer.BadParameter(f"{place} cannot be written")
    return path


def written_file(help: str, *names: str) -> Any:  # noqa: A002  typer's name
    """Return the option of a file to write."""
    return typer.Option(*names, dir_okay=False, callback=check_writable, help=help)


def check_json(path: Path | None) -> Path | None:
    """Check that a file of JSON lines can be written; ``-`` is stdout."""
    return path if path == names.STDOUT else check_writable(path)


# Far beyond what one machine can emulate, and small enough that matrices fit into memory.
_MAX_NODES, _MAX_RANKS_PER_NODE, _MAX_TOKENS, _MAX_HIDDEN, _MAX_EXPERTS = 1024, 128, 1 << 22, 1 << 27, 1 << 14

Nodes = Annotated[int, typer.Option(min=1, max=_MAX_NODES, help="Nodes to emulate on this machine.")]
RanksPerNode = Annotated[int, typer.Option(min=1, max=_MAX_RANKS_PER_NODE, help="Ranks of each node.")]
AnyNodes = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=_MAX_NODES,
        help="Nodes to emulate on this machine. Default: 2, on CUDA and for prefill 1; under torchrun, those of the "
        "job.",
    ),
]
AnyRanksPerNode = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=_MAX_RANKS_PER_NODE,
        help="Ranks of each node. Default: 2, on CUDA all GPUs; under torchrun, those of the job.",
    ),
]
Skew = Annotated[float, typer.Option(min=0, max=100, help="Skew of the Zipf matrix; FAST has 0.3 to 0.9.")]
SparePlaces = Annotated[int, typer.Option(min=0, max=64, help="Places for copies of busy experts on each rank.")]
SparePlacesOfBatch = Annotated[
    int, typer.Option(min=1, max=64, help="With --balance: places of each rank for copied experts.")
]
LatencyUs = Annotated[float, typer.Option(min=0, max=1e9, help="Fixed cost of each stage, in microseconds.")]
InternodeGbs = Annotated[float, typer.Option(max=1e6, help="Bandwidth of a rank between nodes, in GB/s.")]
Draws = Annotated[int, typer.Option(min=1, max=1 << 20, help="Draws for each shape.")]
RingDepth = Annotated[int, typer.Option(min=2, help="Slots of each ring.")]
Timeout = Annotated[float, typer.Option("--timeout-s", min=0.1, help="Limit of every wait in fusco, in seconds.")]
Iterations = Annotated[int, typer.Option(min=1, help="Timed iterations; medians are shown.")]
Tokens = Annotated[int, typer.Option(min=1, max=_MAX_TOKENS, help="Tokens of each rank.")]
Hidden = Annotated[int, typer.Option(min=1, max=_MAX_HIDDEN, help="Elements of a row.")]
NumExperts = Annotated[int, typer.Option(min=1, max=_MAX_EXPERTS, help="Experts of all ranks.")]
NumTopk = Annotated[int, typer.Option(min=1, max=_MAX_EXPERTS, help="Experts per token (top-k).")]
Dtype = Annotated[RowDtype, typer.Option(help="Dtype of rows.")]
Pattern = Annotated[names.Pattern, typer.Option("--traffic", help="Traffic pattern (FUSCO, section 5.2).")]
Patterns = Annotated[
    list[str],
    typer.Option(
        "--traffic",
        metavar="[" + "|".join(get_args(names.Pattern)) + "],...",
        help="Traffic patterns (FUSCO, section 5.2); several with commas, or repeated, run on the same ranks.",
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        exists=True,
        dir_okay=False,
        help="Routing to replay: npz or npy of ids (tokens, layers, topk). Default: the Qwen3-30B-A3B trace shipped.",
    ),
]
TraceKey = Annotated[str | None, typer.Option(help="Array of an npz trace. Default: the one of ids.")]
Layer = Annotated[
    int | None, typer.Option(min=0, help="Layer of the trace. Default: 0; with batches of a prefill all in turn.")
]
Batches = Annotated[int, typer.Option(min=1, help="Batches of a prefill (one-prompt, ragged), in order of arrival.")]
Seed = Annotated[int, typer.Option(min=0, max=1 << 32, help="Seed of rows, weights and synthetic traffic.")]
Balancer = Annotated[BalancerName, typer.Option(help="Balancer of the rows between nodes.")]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        dir_okay=False,
        callback=check_json,
        help="Also write JSON lines here; - means stdout, with tables on stderr.",
    ),
]

HtmlFile = Annotated[Path | None, written_file("Also write a page that shows the records (fusco explore).", "--html")]


def given_options(context: typer.Context) -> dict[str, Any]:
    """Return the values of the options that the user has given, by name: ``--num-experts``."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    names_given = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    return {f"--{name.replace('_', '-')}": context.params[name] for name in names_given}


def check_skew(given: dict[str, Any], option: str, matrices: Sequence[str]) -> None:
    """Raise ``ValueError`` if ``--skew`` is given, but none of the matrices of ``option`` has one."""
    if "--skew" in given and "zipf" not in matrices:
        raise ValueError(f"--skew {given['--skew']:g} goes with {option} zipf, not with {', '.join(matrices)}")


def choose_names(given: Sequence[str] | None, allowed: Sequence[str], option: str) -> list[str]:
    """Return names given with commas between them, repeatedly, or both; all allowed ones without the option.

    Raises ``ValueError`` for no name, or one that is not allowed. With empty ``allowed`` the caller checks the names.
    """
    if given is None:
        return list(allowed)
    names = [name.strip() for part in given for name in part.split(",") if name.strip()]
    if not names:
        raise ValueError(f"--{option} needs at least one name")
    for name in names:
        if allowed and name not in allowed:
            raise ValueError(f"{option} {name!r} is not one of {', '.join(allowed)}")
    return list(dict.fromkeys(names))


def runnable(names: Sequence[str], obstacle: Callable[[str], str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the variants that can run, and why the others cannot; ``ValueError`` if none can.

    >>> runnable(["fusco", "deep_ep"], lambda name: "not installed" if name == "deep_ep" else "")
    (('fusco',), {'deep_ep': 'not installed'})
    """
    skipped = {name: why for name in names if (why := obstacle(name))}
    chosen = tuple(name for name in names if name not in skipped)
    if not chosen:
        raise ValueError("no variant can run here: " + "; ".join(f"{name}: {why}" for name, why in skipped.items()))
    return chosen, skipped


def integers(given: Sequence[str], option: str) -> list[int]:
    """Return positive integers given with commas between them, repeatedly, or both; else ``ValueError``.

    >>> integers(["8,64", "512"], "nodes")
    [8, 64, 512]
    """
    names = choose_names(given, [], option)
    for name in names:
        if not name.isdecimal() or not int(name):
            raise ValueError(f"--{option} needs positive integers, got {name!r}")
    return [int(name) for name in names]


def numbers(given: Sequence[str], option: str) -> list[float]:
    """Return numbers from 0 on, given as ``integers`` takes them; else ``ValueError``.

    >>> numbers(["0,0.5", "1"], "sweep-skew")
    [0.0, 0.5, 1.0]
    """
    names = choose_names(given, [], option)
    for name in names:
        if not name.replace(".", "", 1).isdecimal():
            raise ValueError(f"--{option} needs numbers from 0 on, got {name!r}")
    return [float(name) for name in names]


@dataclass(frozen=True, kw_only=True)
class RoutingOptions:
    """Options that describe a rank's tokens and the experts that they choose, except ``--traffic``."""

    tokens: Tokens = 1024
    num_experts: NumExperts = 128
    num_topk: NumTopk = 8
    trace: TraceFile = None
    trace_key: TraceKey = None
    layer: Layer = None
    seed: Seed = 0

    def check_no_trace(self, option: str, given: Sequence[str]) -> None:
        """Raise ``ValueError`` if options of a trace are given although ``option`` selects no trace."""
        for name in ("trace", "trace_key", "layer"):
            if getattr(self, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} goes with {option} trace, not with {', '.join(given)}")


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions(RoutingOptions):
    """Options that describe a workload, except ``--traffic``."""

    hidden: Hidden = 4096
    dtype: Dtype = "bfloat16"

    def check(self, patterns: Sequence[str]) -> None:
        """Raise ``ValueError`` if options do not fit together, whatever the ranks."""
        if not set(patterns) & set(names.REPLAYED):
            self.check_no_trace("--traffic", patterns)
        if self.num_topk > self.num_experts:
            raise ValueError(f"num_topk is {self.num_topk}, more than the {self.num_experts} experts")

    def workloads(
        self, patterns: Sequence[names.Pattern], topology: Topology, num_batches: int = 1
    ) -> tuple[Workload, ...]:
        """Return a workload for each pattern, and batch of a prefill; ``ValueError`` if options do not fit together."""
        self.check(patterns)
        world_size = topology.world_size
        if self.num_experts % world_size:
            raise ValueError(
                f"{self.num_experts} experts do not divide evenly among {world_size} ranks: choose --num-experts, a "
                f"multiple of {world_size}, such as {-(-self.num_experts // world_size) * world_size}"
            )
        return tuple(chain.from_iterable(self._of_pattern(each, topology, num_batches) for each in patterns))

    def _of_pattern(self, pattern: names.Pattern, topology: Topology, num_batches: int) -> list[Workload]:
        import torch

        from fusco.bench.inputs.prompts import draw_batches
        from fusco.bench.inputs.traffic import Trace, Workload
        from fusco.core.placement import ExpertPlacement

        world_size, is_replayed = topology.world_size, pattern in names.REPLAYED
        batches: list[Any] = [None]
        if pattern in get_args(names.Prefill):
            batches = draw_batches(cast("names.Prefill", pattern), num_batches, self.tokens, world_size, self.seed)
        return [
            Workload(
                pattern=pattern,
                topology=topology,
                placement=ExpertPlacement.contiguous(self.num_experts, world_size),
                tokens=self.tokens,
                hidden=self.hidden,
                num_topk=self.num_topk,
                dtype=getattr(torch, self.dtype),
                seed=self.seed,
                trace=Trace.load(self.trace, self.trace_key, self._layer_of(batch)) if is_replayed else None,
                batch=batch,
            )
            for batch in batches
        ]

    def _layer_of(self, batch: Batch | None) -> int:
        """Return the layer to replay: by default the first, or in turn those of the trace that comes with fusco."""
        if self.layer is not None or batch is None or self.trace is not None:
            return self.layer or 0
        return batch.number % _NUM_LAYERS


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with an option for each field of the dataclasses among its parameters, which it is given.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Size:
    ...     width: int = 4
    ...     height: int = 3
    >>> @with_groups
    ... def draw(*, colour: str, size: Size) -> None:
    ...     print(colour, size)
    >>> list(inspect.signature(draw).parameters)
    ['colour', 'width', 'height']
    >>> draw(colour="red", width=5, height=2)
    red Size(width=5, height=2)
    """
    groups: dict[str, Callable[..., Any]] = {}
    option_to_group: dict[str, str] = {}
    options: list[inspect.Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        group = hints[name]
        if not is_dataclass(group):
            options.append(parameter.replace(annotation=group))
            continue
        assert isinstance(group, type)
        groups[name] = group
        of_group = get_type_hints(group, include_extras=True)
        for field in fields(group):
            option_to_group[field.name] = name
            options.append(
                inspect.Parameter(
                    field.name, parameter.KEYWORD_ONLY, default=field.default, annotation=of_group[field.name]
                )
            )

    @wraps(command)
    def run(**given: Any) -> None:
        of_groups: dict[str, dict[str, Any]] = {name: {} for name in groups}
        for option, name in option_to_group.items():
            of_groups[name][option] = given.pop(option)
        command(**given, **{name: group(**of_groups[name]) for name, group in groups.items()})

    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run
