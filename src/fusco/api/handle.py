"""Result of ``dispatch``, and the handle that ``combine``, gradients and ``dispatch_again`` need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fusco.core.balance import BatchPlan
from fusco.core.quantization import Quantize, dequantize_rows
from fusco.core.rows import expert_rows_shape
from fusco.engine.base import Plan


@dataclass(frozen=True, repr=False, init=False)
class Handle:
    """A planned routing. It belongs to the communicator that made it and serves any number of calls.

    Attributes:
        plan: both levels of descriptors, as this rank executes them.
        topk_weights: the caller's weights (num_tokens, num_topk), to which gradients flow; ``None`` if none were given.
        number: sequence number of the collective that planned it; ranks compare it when they use a handle together.
        weights_version: how often PyTorch had counted a change of the weights in place when they were sent.
    """

    plan: Plan
    topk_weights: torch.Tensor | None
    number: int
    weights_version: int = 0

    def __init__(self, plan: Plan, topk_weights: torch.Tensor | None, number: int, weights_version: int = 0) -> None:
        # All at once: one by one, as in frozen dataclasses, takes two to three times as long.
        fields = {"plan": plan, "topk_weights": topk_weights, "number": number, "weights_version": weights_version}
        object.__setattr__(self, "__dict__", fields)

    def __repr__(self) -> str:
        weights = ", weighted" if self.is_weighted else ""
        return f"Handle(of dispatch #{self.number}, {self.num_tokens} tokens, {self.num_rows} rows{weights})"

    @property
    def num_tokens(self) -> int:
        """Number of tokens of this rank."""
        return self.plan.num_tokens

    @property
    def num_topk(self) -> int:
        """Experts per token (top-k)."""
        return self.plan.num_topk

    @property
    def num_rows(self) -> int:
        """Number of expert-major rows of this rank, including padding."""
        return self.plan.num_slots

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """Leading dimensions of rows: (num_rows,), or (num_local_experts, rows_per_expert) of a masked output."""
        return expert_rows_shape(self.plan.num_slots, self.plan.rows_per_expert)

    @property
    def is_weighted(self) -> bool:
        """True if the dispatch had weights, which ``combine`` applies unless its ``weights`` are ``None``."""
        return self.topk_weights is not None


def version_of(topk_weights: torch.Tensor | None) -> int:
    """Return how often weights were changed in place; 0 for none, and in inference mode, which does not count."""
    return 0 if topk_weights is None or topk_weights.is_inference() else topk_weights._version  # noqa: SLF001


def without_weights(handle: Handle) -> Handle:
    """Return a handle of the same routing whose ``combine`` adds rows up as they are, as gradients need."""
    return replace(handle, topk_weights=None)


@dataclass(frozen=True, repr=False, init=False)
class Dispatched:
    """Result of ``dispatch``.

    Attributes:
        payloads: expert-major rows (num_rows, ...) of each payload, in its dtype. Blocks are in order of local expert,
            or of place if experts are in places; rows of a block in order of (source rank, token, k). Padding inside
            the blocks is zero. With static rows, those behind the last block are uninitialised. With
            ``StaticRows(rows_per_expert=c)`` rows are (num_local_experts, c, ...), and those behind each block are
            uninitialised.
        num_rows_per_expert: int64 (num_local_experts,) on the device of the rows, without padding and dropped rows. The
            handle reads it, too, so change a copy only.
        weights: the weight of each row, (num_rows,) or (num_local_experts, c), if requested; zero where there is none.
        handle: for ``combine``, or to dispatch other payloads along the same routing.
        event: recorded after the dispatch, if it runs on the communicator's stream; see ``wait``.
        quantize: how the rows are quantised; then ``payloads`` are values and scales. ``None`` for rows as they were.
        dtype: of the rows before they were quantised.
        gradients: zeros (num_rows, hidden) of that dtype, with one element in memory, if ``x`` requires gradients and
            ``Quantize.straight_through`` lets them pass. A gradient of these is one of the rows: give them to the
            ``autograd.Function`` of experts that read values and scales, and return the rows' gradient for them.
        batch_plan: with ``balance``, the plan of the batch, for ``prefetch_experts``.
    """

    payloads: tuple[torch.Tensor, ...]
    num_rows_per_expert: torch.Tensor
    weights: torch.Tensor | None
    handle: Handle
    event: torch.cuda.Event | None = None
    quantize: Quantize | None = None
    dtype: torch.dtype | None = None
    gradients: torch.Tensor | None = None
    batch_plan: BatchPlan | None = None

    def __init__(  # noqa: PLR0913, PLR0917  all fields
        self,
        payloads: tuple[torch.Tensor, ...],
        num_rows_per_expert: torch.Tensor,
        weights: torch.Tensor | None,
        handle: Handle,
        event: torch.cuda.Event | None = None,
        quantize: Quantize | None = None,
        dtype: torch.dtype | None = None,
        gradients: torch.Tensor | None = None,
        batch_plan: BatchPlan | None = None,
    ) -> None:
        fields = {
            "payloads": payloads,
            "num_rows_per_expert": num_rows_per_expert,
            "weights": weights,
            "handle": handle,
            "event": event,
            "quantize": quantize,
            "dtype": dtype,
            "gradients": gradients,
            "batch_plan": batch_plan,
        }
        object.__setattr__(self, "__dict__", fields)  # as in ``Handle``

    def __repr__(self) -> str:
        rows = ", ".join(f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in self.payloads)
        return f"Dispatched({rows} on {self.rows.device}, {len(self.num_rows_per_expert)} local experts)"

    @property
    def num_rows_per_expert_on_host(self) -> torch.Tensor | None:
        """The counts in host memory, int64 (num_local_experts,); ``None`` on CUDA with static rows.

        They came in the same wait of the host as the number of rows: reading them waits for nothing.
        """
        return self.handle.plan.num_rows_per_expert_on_host

    @property
    def num_rows_needed(self) -> torch.Tensor:
        """Rows that an output needs to drop none, int32 (1,) on the device of the rows.

        With static rows, ``num_rows_needed > num_rows`` says on the device, without a wait, that rows were dropped.
        With ``rows_per_expert`` it is the number of rows of the expert with the most, to be compared with that.
        """
        return self.handle.plan.num_rows_needed

    @property
    def num_dropped_per_expert(self) -> torch.Tensor:
        """Rows of each local expert that static rows had no room for, int32 (num_local_experts,) on their device.

        Rows that ``max_rows_to_node`` left behind on another node are not among them.
        """
        return self.handle.plan.num_dropped_per_expert

    @property
    def rows(self) -> torch.Tensor:
        """Rows of the first payload, or of the only one."""
        return self.payloads[0]

    @property
    def scales(self) -> torch.Tensor | None:
        """Scales of quantised rows, in the layout and dtype that ``quantize`` says; ``None`` for other rows."""
        return self.payloads[1] if self.quantize else None

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the rows that values and scales stand for, (num_rows, hidden), by default of the dtype of ``x``.

        Gradients go straight through if ``Quantize.straight_through`` says so. Raises ``ValueError`` unless the rows
        are quantised.
        """
        wanted = dtype or self.dtype
        if self.quantize is None or wanted is None:
            raise ValueError("this dispatch was not quantised, so its rows are what was sent: read sent.rows")
        described = self.rows, self.payloads[1], self.quantize, wanted
        if self.gradients is None:
            return dequantize_rows(*described)
        return DequantizeRows.apply(self.gradients, *described)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Make the current CUDA stream wait for this dispatch, but for no call launched after it.

        Needed only with ``Launch(own_stream=True)``; otherwise, and on the CPU, it does nothing. The host does not
        wait. The results may be read on the current stream afterwards, and are kept in memory until it has read them.
        """
        if self.event is None:
            return
        stream = torch.cuda.current_stream(self.rows.device)
        stream.wait_event(self.event)
        for tensor in (*self.payloads, self.num_rows_per_expert, self.weights):
            if tensor is not None:
                tensor.record_stream(stream)


class DequantizeRows(torch.autograd.Function):
    """Rows (num_rows, hidden) of ``dtype`` that values and scales stand for, as ``dequantize_rows``.

    Gradients go straight through to ``Dispatched.gradients``, of the same shape and dtype.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ARG004  nothing is kept
        gradients: torch.Tensor,  # noqa: ARG004  an input for its gradient alone
        values: torch.Tensor,
        scales: torch.Tensor,
        quantize: Quantize,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Dequantise."""
        return dequantize_rows(values, scales, quantize, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ARG004
        """Pass the gradient on."""
        return grad_rows, None, None, None, None
