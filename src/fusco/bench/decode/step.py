"""A decode step: all layers in one micro-batch, or in two of which one computes while the other's tokens travel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fusco.bench.decode.exchanges import Exchange
from fusco.bench.decode.model import DecodeModel

_Result = TypeVar("_Result")


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
