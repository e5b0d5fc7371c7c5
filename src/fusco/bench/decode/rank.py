"""Each rank's part of ``fusco bench decode``: compare every variant with the reference, then time all in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the usual name

from fusco.bench.decode.exchanges import EAGER, Exchange, make_exchange
from fusco.bench.decode.experts import DecodeExperts, reference_outputs
from fusco.bench.decode.job import DecodeJob
from fusco.bench.decode.records import DecodeRecord, Measured, summarize
from fusco.bench.harness.model_job import gather, run_cases
from fusco.bench.harness.stopwatch import RankTimer, captured, made, measure_in_turn
from fusco.bench.prefill.job import make_routing
from fusco.bench.prefill.variants import relative_error

_NUM_WARM_UPS = 2
_Result = TypeVar("_Result")
_STD = 0.02  # of weights, as in Qwen3
_NORM_EPS = 1e-6


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


class DecodeStep:
    """The step of a rank by one variant; on CUDA it can be captured, as its inputs stay where they are."""

    def __init__(
        self, model: DecodeModel, exchange: Exchange, inputs: tuple[torch.Tensor, torch.Tensor], micro_batches: int
    ) -> None:
        """``inputs`` are the latest token of each sequence (num_tokens,) and its experts (num_layers, num_tokens, K).

        Both are int64, and are read anew in every step.
        """
        self._model, self._exchange = model, exchange
        self._tokens, self._topk_idx = (each.chunk(micro_batches, dim=each.ndim // 2) for each in inputs)
        self._firsts = [sum(map(len, self._tokens[:i])) for i in range(micro_batches)]
        self._transport = _Transport(has_stream=inputs[0].is_cuda and micro_batches > 1)
        self.hidden = torch.empty(0, device=inputs[0].device, dtype=torch.float32)
        self.next_tokens = torch.empty_like(inputs[0])

    def run(self) -> None:
        """Compute ``hidden``, the last hidden states (num_tokens, hidden), and ``next_tokens``, int64 (num_tokens,)."""
        parts: list[Any] = [self._model.embeddings[tokens] for tokens in self._tokens]
        for index in range(len(self._model.layers)):
            parts = self._layer(index, parts)
        self.hidden = torch.cat([residual + moved() for residual, moved in parts])
        self.next_tokens = self._model.next_tokens(self.hidden)

    def _layer(self, index: int, parts: list[Any]) -> list[Any]:
        """Run a block; between blocks a micro-batch is its residual stream, and what waits for the experts' sums."""
        layer, sent = self._model.layers[index], []
        for i, part in enumerate(parts):
            x = part if isinstance(part, torch.Tensor) else part[0] + part[1]()
            topk_idx = self._topk_idx[i][index]
            residual, tokens, weights = layer.before_experts(x, self._firsts[i], topk_idx)
            rows = self._exchange.rows_of(layer.experts, tokens)
            sent.append((residual, self._transport.start(self._exchange.dispatch, rows, topk_idx, weights)))
        done = []
        for residual, arrived in sent:
            there = arrived()
            y = there.run(layer.experts)
            done.append((residual, self._transport.start(self._exchange.combine, y, there)))
        return done


class _Transport:
    """Runs what moves tokens: at once, or on a stream of its own while the current stream computes."""

    def __init__(self, *, has_stream: bool) -> None:
        self._stream = torch.cuda.Stream() if has_stream else None  # type: ignore[no-untyped-call]
        # Tensors of two layers: their memory may be taken again only by what follows an event of the other stream.
        self._kept: deque[Any] = deque(maxlen=16)

    def start(self, call: Callable[..., _Result], *arguments: Any) -> Callable[[], _Result]:
        """Begin a call, and return what makes the current stream wait for its result, and returns that."""
        if self._stream is None:
            result = call(*arguments)
            return lambda: result
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = call(*arguments)
            done = self._stream.record_event()
        self._kept.append((arguments, result))

        def wait() -> _Result:
            torch.cuda.current_stream().wait_event(done)
            return result

        return wait


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention of one new token of each sequence to the tokens before it, which are random.

    Without rotations and norms of heads: elementwise work that is the same for all variants.
    """

    qkv: torch.Tensor  # (heads of queries, keys and values * head_dim, hidden)
    out: torch.Tensor  # (hidden, heads of queries * head_dim)
    keys: torch.Tensor  # (max_tokens, num_key_value_heads, context + 1, head_dim); the last is the new token's
    values: torch.Tensor  # as keys

    def __call__(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """Return the attention of sequences ``first`` and following, x being (num_tokens, hidden)."""
        _, num_kv, _, head_dim = self.keys.shape
        heads = F.linear(x, self.qkv).view(len(x), -1, head_dim)
        query, key, value = torch.split(heads, [heads.shape[1] - 2 * num_kv, num_kv, num_kv], dim=1)
        keys, values = (cache[first : first + len(x)] for cache in (self.keys, self.values))
        keys[:, :, -1], values[:, :, -1] = key, value
        attended = F.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)
        return F.linear(attended.reshape(len(x), -1), self.out)


@dataclass(frozen=True)
class DecodeLayer:
    """A block: attention, if the job has it, and experts."""

    router: torch.Tensor  # (num_experts, hidden)
    experts: DecodeExperts  # this rank's
    attention: Attention | None

    def before_experts(
        self, x: torch.Tensor, first: int, topk_idx: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the residual stream, the tokens of the experts, and weights of given experts, float32.

        ``x`` is (num_tokens, hidden), of sequences from ``first`` on; ``topk_idx`` (num_tokens, num_topk).
        """
        if self.attention is not None:
            x = x + self.attention(norm(x), first)
        tokens = norm(x)
        probabilities = F.linear(tokens, self.router).float().softmax(-1).gather(1, topk_idx)
        return x, tokens, probabilities / probabilities.sum(-1, keepdim=True)


class DecodeModel:
    """The weights of a rank: its experts, and everything else as all ranks have it."""

    def __init__(self, job: DecodeJob, rank: int) -> None:
        self.job, shape = job, job.shape
        self._dtype = torch.float32 if job.dtype == "float32" else torch.bfloat16
        self._generator = torch.Generator(job.device).manual_seed(job.seed)
        first = rank * job.num_local_experts
        local = range(first, first + job.num_local_experts)
        self.embeddings, self._head = (self._draw(shape.vocab, shape.hidden) for _ in range(2))
        self.layers = [
            DecodeLayer(
                router=self._draw(shape.num_experts, shape.hidden),
                experts=DecodeExperts.draw(job, index, local),
                attention=self._attention() if job.context else None,
            )
            for index in range(shape.num_layers)
        ]

    def next_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the most probable next token of each sequence, int64 (num_tokens,)."""
        return F.linear(norm(hidden), self._head).argmax(-1)

    def _attention(self) -> Attention:
        job, shape = self.job, self.job.shape
        width = shape.num_heads * shape.head_dim
        cache = max(job.tokens), shape.num_key_value_heads, job.context + 1, shape.head_dim
        return Attention(
            qkv=self._draw(width + 2 * shape.num_key_value_heads * shape.head_dim, shape.hidden),
            out=self._draw(shape.hidden, width),
            keys=self._draw(*cache),
            values=self._draw(*cache),
        )

    def _draw(self, *sizes: int) -> torch.Tensor:
        drawn = torch.empty(sizes, dtype=self._dtype, device=self.job.device)
        return drawn.normal_(0, _STD, generator=self._generator)


def norm(x: torch.Tensor) -> torch.Tensor:
    """Return rows of root mean square 1, as a norm with weights of 1 does."""
    return F.rms_norm(x, x.shape[-1:], eps=_NORM_EPS)
