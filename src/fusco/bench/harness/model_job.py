"""What benchmarks of a model share: their configuration, each rank's loop over cases, limits of errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from fusco.bench.harness.json_lines import write_json_lines
from fusco.bench.ranks.progress import ProgressReporter
from fusco.fsdp.qwen3 import Qwen3Shape

_Case = TypeVar("_Case")
# Small enough for two cores; experts and top-k are those of the routing that is replayed.
TINY = Qwen3Shape(
    num_layers=2, hidden=256, num_heads=4, num_key_value_heads=2, head_dim=64, moe_intermediate=64, vocab=512
)
# The largest error of a token, relative to its vector's norm. Sums of bfloat16 rows round up to twice for each of eight
# experts, each time by 0.2 % at most; FP8 has 3 bits, and of a sum in another order some values round the other way. A
# dropped expert costs 10 % and more. Products of float32 rows may add up in another order. At the end of a model add up
# what all layers round. Measured of prefills: 0.0055 and, of 48 layers, 0.019 (2 H200, bfloat16), 1e-7 and 4e-7 (two
# ranks on a CPU, two layers, float32). FP8 rounds a value that is a little different to one that is 6 % different: one
# part in 10,000 of noise in products becomes 0.02 a layer, 0.22 at the end of 12 (on a CPU; 0.36 with all that GPUs
# add). So its limit there grows with the layers, but stays below the 1.4 of two vectors that have nothing in common.
LAYER_LIMITS = {"bfloat16": 0.02, "fp8": 0.05, "float32": 1e-5}
END_LIMITS = {"bfloat16": 0.06, "fp8": 0.1, "float32": 1e-4}
_FP8_END_LIMIT_OF_LAYER, _MAX_END_LIMIT = 0.04, 1.0


@dataclass(frozen=True, kw_only=True)
class ModelJob:
    """A model, its ranks and the variants; ``ValueError`` for values that do not fit together."""

    shape: Qwen3Shape  # of the model
    device: Literal["cpu", "cuda"]  # ``"cpu"`` or ``"cuda"``
    num_ranks: int  # processes; each has its sequences, and its part of the experts
    ranks_per_node: int  # consecutive ranks that form a node
    variants: tuple[str, ...]  # names of the benchmark's ``VARIANTS``, the ones that can run here
    num_iterations: int  # timed runs of each variant
    seed: int = 0  # of weights, tokens and random routing
    timeout_s: float = 60.0  # limit of every wait in fusco, in seconds

    def __post_init__(self) -> None:
        if self.shape.num_experts % self.num_ranks:
            raise ValueError(f"{self.shape.num_experts} experts do not divide evenly among {self.num_ranks} ranks")

    @property
    def num_local_experts(self) -> int:
        """Experts of each layer on a rank."""
        return self.shape.num_experts // self.num_ranks


def run_cases(
    cases: Sequence[_Case],
    run: Callable[[_Case, Callable[[], None]], list[Any]],
    group: dist.ProcessGroup,
    log: Path | None,
    progress_port: int | None,
    num_steps: int,
) -> list[Any]:
    """Return the records of all cases, the same on all ranks; rank 0 appends those of each case to ``log``.

    ``run`` measures a case, and calls what it is given after each of ``num_steps`` steps.
    """
    reporter, records = ProgressReporter(group.rank(), progress_port, num_steps * len(cases)), []
    for case in cases:
        found = run(case, reporter.advance)
        if log and group.rank() == 0:
            write_json_lines(found, log, appends=True)
        records += found
    return records


def gather(group: dist.ProcessGroup, local: Any) -> list[Any]:
    """Return an object of every rank, in order; a collective."""
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, local, group=group)
    return gathered


def errors_beyond(dtype: str, layer: float, end: float, what_ends: str, num_layers: int = 1) -> list[str]:
    """Describe which error is beyond its limit, that of a layer or that at the end of the model.

    >>> errors_beyond("fp8", 0.01, 0.5, "the hidden states of a step are", num_layers=12)
    ['the hidden states of a step are 0.5 off, more than 0.48']
    """
    of_layers = min(_FP8_END_LIMIT_OF_LAYER * num_layers, _MAX_END_LIMIT) if dtype == "fp8" else 0.0
    end_limit = max(END_LIMITS[dtype], of_layers)
    of = (("the output of a layer is", layer, LAYER_LIMITS[dtype]), (what_ends, end, end_limit))
    return [f"{what} {error:.3g} off, more than {limit:g}" for what, error, limit in of if not error <= limit]
