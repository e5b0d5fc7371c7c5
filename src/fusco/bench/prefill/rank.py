"""Each rank's part of ``fusco bench prefill``: compare all variants in every case, then time them in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from fusco.bench.harness.model_job import gather, run_cases
from fusco.bench.harness.stopwatch import measure_in_turn
from fusco.bench.inputs.prompts import describe_prompts, prompt_lengths
from fusco.bench.prefill.iterations import Iteration, measure
from fusco.bench.prefill.job import PrefillJob, make_routing, rows_per_rank
from fusco.bench.prefill.model import PrefillModel, Prompts
from fusco.bench.prefill.records import Case, Measured, PrefillRecord, summarize
from fusco.bench.prefill.variants import (
    EXACT,
    Deviation,
    Layer,
    Variant,
    compare_layer,
    compare_logits,
    make_variants,
    reference_layers,
)

_NUM_WARM_UPS = 2
_NUM_SECTIONED = 3  # prefills whose dispatches and combines are timed


def prefill_rank(
    group: dist.ProcessGroup, job: PrefillJob, log: Path | None, progress_port: int | None
) -> list[PrefillRecord]:
    """Measure one rank's part of a job; a collective. Variants that are not verified are not timed.

    Returns the records of all cases, as ``run_cases``.
    """
    with torch.no_grad(), ExitStack() as stack:
        model = PrefillModel(job, group.rank())
        reference = reference_layers(group, model.experts)
        variants = make_variants(job, group, model.experts, stack)  # before it, as transformers keeps their forward
        bench = PrefillBench(job, group, model, reference)

        def run(case: tuple[str, str], on_step: Callable[[], None]) -> list[PrefillRecord]:
            return bench.run(case[1], case[0], variants, on_step)

        num_steps = 1 + _NUM_WARM_UPS + job.num_iterations + _NUM_SECTIONED
        return run_cases(job.cases, run, group, log, progress_port, num_steps)


class PrefillBench:
    """The model of a rank, with whatever moves tokens at the moment in the place of its experts."""

    def __init__(
        self, job: PrefillJob, group: dist.ProcessGroup, model: PrefillModel, reference: Sequence[Layer]
    ) -> None:
        self._job, self._group, self._model, self._reference = job, group, model, reference
        self._layers: Sequence[Layer] = reference
        self._routing = torch.empty(0, dtype=torch.int64, device=job.device)
        for index, each in enumerate(model.experts):
            each.module.forward = self._forward_of(index)

    def run(
        self, batch: str, routing: str, variants: Sequence[Variant], on_step: Callable[[], None] = lambda: None
    ) -> list[PrefillRecord]:
        """Compare and time all variants in one case; a collective."""
        case, prompts = self._prepare(batch, routing, variants)
        deviations = self._compare(prompts, variants)
        on_step()
        all_of = {variant.name: gather(self._group, deviations[variant.name]) for variant in variants}
        dtype = self._job.dtype
        verified = [each for each in variants if not any(found.failures(dtype) for found in all_of[each.name])]
        iterations = measure_in_turn(
            {variant.name: variant for variant in verified},
            lambda variant: self._iteration(prompts, variant),
            on_step,
            num_warm_ups=_NUM_WARM_UPS,
            num_iterations=self._job.num_iterations,
        )
        sections = self._sections(prompts, verified, on_step)
        of_ranks = gather(self._group, iterations)
        peak = torch.cuda.max_memory_allocated() if self._job.device == "cuda" else 0
        found = []
        for name, of_all in all_of.items():
            measured = Measured(
                iterations=list(zip(*(rank.get(name, ()) for rank in of_ranks), strict=True)),
                section_ms=sections.get(name, {}),
                deviations=of_all,
            )
            found.append(summarize(self._job, case, name, measured, peak))
        return found

    def _prepare(self, batch: str, routing: str, variants: Sequence[Variant]) -> tuple[Case, Prompts]:
        """Set the routing of all layers, and the static rows that it needs."""
        job, shape, rank = self._job, self._job.shape, self._group.rank()
        lengths = prompt_lengths(batch, job.tokens, job.num_ranks)
        sizes = (shape.num_layers, sum(lengths[rank]), shape.num_experts, shape.num_topk)
        ids = make_routing(routing, sizes, rank, job.num_ranks, job.seed)
        rows = rows_per_rank(ids, shape.num_experts, job.num_ranks)
        dist.all_reduce(rows, group=self._group)
        for variant in variants:
            variant.set_static_rows(int(rows.max()))
        self._routing = ids.to(job.device)
        imbalance = round(float((rows.max(1).values / rows.double().mean(1)).mean()), 3)
        case = Case(batch=describe_prompts(batch, lengths), routing=routing, lengths=lengths, imbalance=imbalance)
        return case, Prompts.make(lengths[rank], job, rank)

    def _forward_of(self, index: int) -> Layer:
        def forward(x: torch.Tensor, _: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
            return self._layers[index](x, self._routing[index], topk_weights)

        return forward

    def _compare(self, prompts: Prompts, variants: Sequence[Variant]) -> Mapping[str, Deviation]:
        """Compare every layer on the reference's hidden states, then logits; a collective."""
        deviations = {variant.name: Deviation() for variant in variants}

        def compared(index: int) -> Layer:
            layers = {variant.name: variant.layers[index] for variant in variants}
            return lambda *inputs: compare_layer(layers, self._reference[index], inputs, deviations)

        self._layers = [compared(index) for index in range(len(self._reference))]
        expected, exact = self._model.hidden_states(prompts), None
        for variant in variants:
            self._layers, deviation = variant.layers, deviations[variant.name]
            hidden = self._model.hidden_states(prompts)
            variant.synchronize()
            compare_logits(hidden, expected, self._model.logits, deviation)
            if variant.name in EXACT:
                exact = self._model.hidden_states(prompts) if exact is None else exact
                deviation.num_inexact += not torch.equal(hidden, exact)
        return deviations

    def _iteration(self, prompts: Prompts, variant: Variant) -> Iteration:
        """Measure one prefill from a barrier on; a collective."""
        self._layers = variant.layers
        return measure(self._align, lambda: self._model.first_tokens(prompts), variant.clock, self._job.device)

    def _align(self) -> None:
        if self._job.device == "cuda":
            torch.cuda.synchronize()
        # A barrier on the host: one of NCCL would leave a kernel on the device.
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"), group=self._group)

    def _sections(
        self, prompts: Prompts, variants: Sequence[Variant], on_step: Callable[[], None]
    ) -> dict[str, dict[str, float]]:
        """Return every variant's times of dispatch, combine and prefill, from prefills with marks; a collective."""
        names = ("dispatch", "combine", "prefill")
        rounds: dict[str, list[list[float]]] = {variant.name: [] for variant in variants}
        for _ in range(_NUM_SECTIONED):
            for variant in variants:
                variant.clock.is_on = True
                took = self._iteration(prompts, variant).ms
                variant.clock.is_on = False
                sections_ms = [seconds * 1e3 for seconds in variant.clock.take_s(names[:2]).values()]
                means = torch.tensor([*sections_ms, took], dtype=torch.float64, device="cpu")
                dist.all_reduce(means, group=self._group)
                rounds[variant.name].append((means / self._job.num_ranks).tolist())
            on_step()
        medians = {name: map(median, zip(*each, strict=True)) for name, each in rounds.items()}
        return {name: dict(zip(names, each, strict=True)) for name, each in medians.items()}
