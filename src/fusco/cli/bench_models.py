"""What ``fusco bench prefill`` and ``decode`` share: options of the model, the file of results, notes on variants."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from fusco.bench.harness.json_lines import write_json_lines
from fusco.cli import options
from fusco.cli.reports import left_out
from fusco.cli.testbed import PlaceOptions
from fusco.cli.wording import plural
from fusco.core.files import written_beside

if TYPE_CHECKING:
    from fusco.fsdp.qwen3 import Qwen3Shape


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of the model and the variants."""

    model: Annotated[
        Literal["tiny", "qwen3-30b-a3b"] | None,
        typer.Option(help="Shape of the model. Default: tiny, on CUDA qwen3-30b-a3b."),
    ] = None
    layers: Annotated[int | None, typer.Option(min=1, help="Blocks. Default: all, 48 of Qwen3 and 2 of tiny.")] = None
    variants: Annotated[
        list[str] | None, typer.Option(metavar="NAME,...", help="What moves tokens. Default: all that can run here.")
    ] = None
    seed: options.Seed = 0
    timeout_s: options.Timeout = 60.0

    def is_tiny(self, device: str) -> bool:
        """Return whether the model is the small one."""
        return self.model == "tiny" or (self.model is None and device == "cpu")

    def common(self, place: PlaceOptions) -> dict[str, Any]:
        """Return the values of a ``ModelJob`` that both benchmarks choose alike."""
        from fusco.bench.harness.model_job import TINY
        from fusco.fsdp.qwen3 import Qwen3Shape

        topology, shape = place.topology(num_cpu_nodes=1), TINY if self.is_tiny(place.device) else Qwen3Shape()
        return {
            "shape": replace(shape, num_layers=self.layers or shape.num_layers),
            "device": place.device,
            "num_ranks": topology.world_size,
            "ranks_per_node": topology.ranks_per_node,
            "seed": self.seed,
            "timeout_s": self.timeout_s,
        }


def begin_results(json: Path | None, skipped: Mapping[str, str], earlier: Sequence[str] = ()) -> None:
    """Begin the file of results with the variants that cannot run, and why, and with lines of an earlier run.

    Only rank 0 of a launched job does; its others may be reading the file.
    """
    from fusco.bench.prefill.records import SkippedRecord

    if json is None or os.environ.get("RANK", "0") != "0":
        return
    skips = [SkippedRecord(variant=name, reason=why) for name, why in skipped.items()]
    if not earlier:
        write_json_lines(skips, json)
        return
    with written_beside(json) as beside:
        write_json_lines(skips, beside)
        written = beside.read_text().splitlines()
        with beside.open("a", encoding="utf-8") as lines:
            lines.writelines(f"{line}\n" for line in earlier if line not in written)


def describe_shape(shape: Qwen3Shape) -> str:
    """Return the sizes of a model."""
    return (
        f"{plural(shape.num_layers, 'layer')}, hidden {shape.hidden}, top-{shape.num_topk} of {shape.num_experts} "
        f"experts of width {shape.moe_intermediate}"
    )


def print_variants(
    console: Console,
    known: Mapping[str, str],
    chosen: Iterable[str],
    skipped: Mapping[str, str],
    slow: Sequence[str] = (),
    *,
    explain: bool,
) -> None:
    """Print what the variants are, which were skipped, and slow iterations; or that there is more."""
    lines = [left_out(skipped, len(slow))]
    if explain:
        lines = [f"{name}: {known[name]}" for name in chosen]
        lines += [f"{name} skipped: {why}" for name, why in skipped.items()] + list(slow)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
