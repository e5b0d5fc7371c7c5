"""Each rank's part of ``fusco bench decode``: compare every variant with the reference, then time all in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from fusco.bench.decode.exchanges import EAGER, Exchange, make_exchange
from fusco.bench.decode.experts import reference_outputs
from fusco.bench.decode.job import DecodeJob
from fusco.bench.decode.model import DecodeModel
from fusco.bench.decode.records import DecodeRecord, Measured, summarize
from fusco.bench.decode.step import DecodeStep
from fusco.bench.harness.capture import captured
from fusco.bench.harness.model_job import gather, run_cases
from fusco.bench.harness.rounds import made, measure_in_turn
from fusco.bench.harness.stopwatch import RankTimer
from fusco.bench.prefill.gate import relative_error
from fusco.bench.prefill.routing import make_routing

_NUM_WARM_UPS = 2


def decode_rank(
    group: dist.ProcessGroup, job: DecodeJob, log: Path | None, progress_port: int | None
) -> list[DecodeRecord]:
    """Measure one rank's part of a job; a collective. Variants that are not verified are not timed.

    Returns the records of all cases, as ``run_cases``.
    """
    with torch.no_grad(), ExitStack() as stack:
        exchanges = {}
        for name in job.variants:
            if exchange := made(name, partial(make_exchange, name, job, group, stack), is_peer=name == "deep_ep"):
                exchanges[name] = exchange
        bench = DecodeBench(job, group, DecodeModel(job, group.rank()))
        num_steps = 1 + _NUM_WARM_UPS + job.num_iterations
        return run_cases(
            job.cases, lambda case, on_step: bench.run(case, exchanges, on_step), group, log, progress_port, num_steps
        )


@dataclass(frozen=True)
class _Expected:
    """What the reference computes of a rank's inputs."""

    # of each layer: the tokens of its experts, their experts and weights, and the outputs
    layers: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
    hidden: torch.Tensor  # the last hidden states (num_tokens, hidden)


class DecodeBench:
    """The model of a rank, and its inputs, which all variants get."""

    def __init__(self, job: DecodeJob, group: dist.ProcessGroup, model: DecodeModel) -> None:
        """Make it; a collective of the group."""
        self._job, self._group, self._model = job, group, model
        self._timer = RankTimer(group, job.device)

    def run(
        self, case: tuple[int, int], exchanges: Mapping[str, Exchange], on_step: Callable[[], None] = lambda: None
    ) -> list[DecodeRecord]:
        """Compare and time all variants in one case, a number of tokens and of micro-batches; a collective."""
        job, (num_tokens, micro_batches) = self._job, case
        tokens, topk_idx = self._inputs(num_tokens)
        expected = self._expect(tokens, topk_idx)
        with ExitStack() as stack:
            measured, calls = {}, {}
            for name, exchange in exchanges.items():
                # Captured, if at all, with other tokens than those that count: a replay must read its inputs.
                inputs = (torch.zeros_like(tokens), topk_idx)
                step = DecodeStep(self._model, exchange, inputs, micro_batches)
                calls[name] = stack.enter_context(captured(step.run)) if self._is_graph(name) else step.run
                inputs[0].copy_(tokens)
                measured[name] = self._compare(exchange, calls[name], step, expected)
            on_step()
            of_all = {name: gather(self._group, of) for name, of in measured.items()}
            verified = {name: calls[name] for name, ranks in of_all.items() if not any(r.failures(job) for r in ranks)}
            times = measure_in_turn(
                verified,
                lambda call: self._timer.host_times_ms(call)[0],
                on_step,
                num_warm_ups=_NUM_WARM_UPS,
                num_iterations=job.num_iterations,
            )
        for exchange in exchanges.values():
            exchange.synchronize()
        timed = {name: gather(self._group, replace(of, times_ms=times.get(name, ()))) for name, of in measured.items()}
        return [summarize(job, case, name, ranks, is_graph=self._is_graph(name)) for name, ranks in timed.items()]

    def _is_graph(self, name: str) -> bool:
        return self._job.device == "cuda" and name not in EAGER

    def _inputs(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a rank's tokens (num_tokens,) and their experts in all layers (num_layers, num_tokens, num_topk)."""
        job, shape, rank = self._job, self._job.shape, self._group.rank()
        generator = torch.Generator("cpu").manual_seed(job.seed * 65537 + rank)
        tokens = torch.randint(shape.vocab, (num_tokens,), generator=generator, device="cpu")
        sizes = (shape.num_layers, num_tokens, shape.num_experts, shape.num_topk)
        topk_idx = make_routing(job.routing, sizes, rank, job.num_ranks, job.seed)
        return tokens.to(job.device), topk_idx.to(job.device)

    def _expect(self, tokens: torch.Tensor, topk_idx: torch.Tensor) -> _Expected:
        """Compute this rank's step with all experts here; no rank takes part in another's."""
        x, layers = self._model.embeddings[tokens], []
        for index, layer in enumerate(self._model.layers):
            x, rows, weights = layer.before_experts(x, 0, topk_idx[index])
            out = reference_outputs(self._job, index, rows, topk_idx[index], weights)
            layers.append((rows, topk_idx[index], weights, out))
            x = x + out
        return _Expected(layers, x)

    def _compare(self, exchange: Exchange, call: Callable[[], None], step: DecodeStep, expected: _Expected) -> Measured:
        """Compare every layer on the reference's tokens, then a whole step as it will be timed; a collective."""
        layer_error = 0.0
        for layer, (tokens, topk_idx, weights, wanted) in zip(self._model.layers, expected.layers, strict=True):
            sent = exchange.dispatch(exchange.rows_of(layer.experts, tokens), topk_idx, weights)
            out = exchange.combine(sent.run(layer.experts), sent)
            layer_error = max(layer_error, float(relative_error(out, wanted).max()))
        call()
        exchange.synchronize()
        return Measured(layer_error=layer_error, step_error=float(relative_error(step.hidden, expected.hidden).max()))
