"""Configuration of ``fusco bench prefill``, validated before any process is started."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

from fusco.bench.harness.model_job import ModelJob
from fusco.bench.inputs.prompts import prompt_lengths
from fusco.bench.prefill.routing import ROUTINGS, check_routing


@dataclass(frozen=True, kw_only=True)
class PrefillJob(ModelJob):
    """A run: every batch with every routing, by every variant."""

    tokens: int  # most tokens of a rank in one prefill
    batches: tuple[str, ...]  # see ``prompt_lengths``
    routings: tuple[str, ...] = ROUTINGS  # names of ``ROUTINGS``
    dtype: Literal["float32", "bfloat16"]  # of weights and rows
    spare_places: int = 2  # of each rank, for the experts that "fusco-balanced" copies
    done: tuple[tuple[str, str], ...] = ()  # cases that are not run again: a routing and a batch

    def __post_init__(self) -> None:
        super().__post_init__()
        for routing in self.routings:
            check_routing(routing, self.shape.num_experts, self.shape.num_topk)
        for batch in self.batches:
            prompt_lengths(batch, self.tokens, self.num_ranks)

    @property
    def cases(self) -> list[tuple[str, str]]:
        """Routings and batches that are to run."""
        return [case for case in product(self.routings, self.batches) if case not in self.done]

    @property
    def parameter_bytes(self) -> int:
        """Bytes of a rank's parameters without norms: dense ones, and its experts."""
        return (4 if self.dtype == "float32" else 2) * self.shape.num_parameters(self.num_local_experts)
