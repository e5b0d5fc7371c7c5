"""``torch.ops.fusco.dispatch`` and ``combine``: the verbs as custom operators for compilers and dispatch modes.

An operator takes and returns tensors and numbers only. So ``dispatch`` returns a *ticket* for its handle: an int64
tensor (1,) on the CPU, whose memory owns the handle. The handle lives as long as that memory: while the caller,
autograd, or a checkpoint keeps the ticket or a view of it. A copy of a ticket owns nothing.
"""

from __future__ import annotations

from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.distributed as dist

from fusco.api.autograd import Verbs, gradients_of_combine
from fusco.api.communicator import Communicator
from fusco.api.handle import Handle, without_weights
from fusco.core.config import Launch, StaticRows


class CommunicatorMaker(Protocol):
    """A dispatcher, as operators use it: its options, and a communicator for rows like those of a tensor."""

    launch: Launch
    static: StaticRows | None
    group: dist.ProcessGroup

    def communicator(self, num_experts: int, num_topk: int, x: torch.Tensor, spare_places: int) -> Communicator:
        """Return the communicator; a collective when it is made."""


class _Held:
    """A handle, and the verbs of the communicator that it comes from."""

    def __init__(self, comm: Communicator, handle: Handle, launch: Launch) -> None:
        self.handle = handle
        self.verbs = Verbs(
            lambda x, handle: comm.dispatch_again(x, handle, launch=launch)[0],
            lambda y, handle: comm.combine(y, handle, launch=launch),
            lambda ys, handle: comm.combine_all(ys, handle, launch=launch),
        )


class _TicketMemory(np.ndarray[tuple[int], np.dtype[np.int64]]):
    """Memory of a ticket: torch keeps the array while any tensor uses the memory."""

    held: _Held


# Module state: torch's operators are global and take tensors and numbers only, so dispatchers and handles are found by
# number. The weak references keep nothing alive.
_numbers = count()
_key_to_dispatcher: WeakValueDictionary[int, CommunicatorMaker] = WeakValueDictionary()
_key_to_held: WeakValueDictionary[int, _Held] = WeakValueDictionary()


def register(dispatcher: CommunicatorMaker) -> int:
    """Register a dispatcher while it lives, and return the key by which operators find it."""
    key = next(_numbers)
    _key_to_dispatcher[key] = dispatcher
    return key


def is_intercepted() -> bool:
    """Return whether a compiler or a dispatch mode, such as selective checkpointing, intercepts operations."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0  # noqa: SLF001  no public query


@torch.library.custom_op("fusco::dispatch", mutates_args=())
def dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    num_local_experts: int,
    dispatcher: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Send tokens to their experts; ``dispatcher`` is a key from ``register``, other arguments as of ``Dispatcher``.

    Gradients flow to ``x``; those of ``topk_weights`` flow through ``combine``. Returns expert-major rows
    (num_rows, hidden), int64 (num_local_experts,) rows of each local expert, and the ticket.
    """
    maker = _key_to_dispatcher[dispatcher]
    spare_places = num_local_experts - num_experts // maker.group.size()
    comm = maker.communicator(num_experts, topk_idx.shape[1], x, spare_places)
    with torch.no_grad():
        sent = comm.dispatch(x.detach(), topk_idx, topk_weights.detach(), static=maker.static, launch=maker.launch)
    assert len(sent.num_rows_per_expert) == num_local_experts
    return sent.rows, sent.num_rows_per_expert, _ticket_of(_Held(comm, sent.handle, maker.launch))


@torch.library.custom_op("fusco::combine", mutates_args=())
def combine(y: torch.Tensor, topk_weights: torch.Tensor, ticket: torch.Tensor) -> torch.Tensor:
    """Return the results (num_rows, hidden) as (num_tokens, hidden), weighted with the weights of the dispatch.

    Gradients flow to ``y`` and to ``topk_weights``, which must be those of the dispatch.
    """
    held = _held_by(ticket)
    with torch.no_grad():
        return held.verbs.combine(y.detach(), held.handle)


@torch.library.custom_op("fusco::dispatch_backward", mutates_args=())
def dispatch_backward(grad_rows: torch.Tensor, ticket: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the gradient of ``x``, (num_tokens, hidden), from that of the rows."""
    held = _held_by(ticket)
    assert held.handle.num_tokens == num_tokens
    with torch.no_grad():
        return held.verbs.combine(grad_rows.detach(), without_weights(held.handle))


@torch.library.custom_op("fusco::combine_backward", mutates_args=())
def combine_backward(
    grad_out: torch.Tensor, y: torch.Tensor | None, topk_weights: torch.Tensor, num_rows: int, ticket: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of ``y``, (num_rows, hidden), and of the weights: no rows if ``y`` is ``None``."""
    held = _held_by(ticket)
    with torch.no_grad():
        grad_y, grad_weights = gradients_of_combine(grad_out.detach(), y, held.handle, held.verbs)
    assert len(grad_y) == num_rows
    return grad_y, topk_weights.new_empty(0, topk_weights.shape[1]) if grad_weights is None else grad_weights


def _ticket_of(held: _Held) -> torch.Tensor:
    key = next(_numbers)
    memory = np.array([key], dtype=np.int64).view(_TicketMemory)
    memory.held = held
    _key_to_held[key] = held
    return torch.from_numpy(memory)


def _held_by(ticket: torch.Tensor) -> _Held:
    held = _key_to_held.get(int(ticket))
    if held is None:
        raise ValueError(f"the handle of ticket {int(ticket)} is freed: a copy of a ticket does not keep it alive")
    return held


@dispatch.register_fake
def _fake_dispatch(
    x: torch.Tensor, topk_idx: object, topk_weights: object, num_experts: object, num_local_experts: int, _: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows = torch.library.get_ctx().new_dynamic_size()  # depends on the routing of all ranks
    ticket = torch.empty(1, dtype=torch.int64, device="cpu")
    return x.new_empty(num_rows, x.shape[1]), x.new_empty(num_local_experts, dtype=torch.int64), ticket


@combine.register_fake
def _fake_combine(y: torch.Tensor, topk_weights: torch.Tensor, ticket: object) -> torch.Tensor:
    return y.new_empty(topk_weights.shape[0], y.shape[1])


@dispatch_backward.register_fake
def _fake_dispatch_backward(grad_rows: torch.Tensor, ticket: object, num_tokens: int) -> torch.Tensor:
    return grad_rows.new_empty(num_tokens, grad_rows.shape[1])


@combine_backward.register_fake
def _fake_combine_backward(
    grad_out: torch.Tensor, y: torch.Tensor | None, topk_weights: torch.Tensor, num_rows: int, ticket: object
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_weights = topk_weights.new_empty(0 if y is None else topk_weights.shape[0], topk_weights.shape[1])
    return grad_out.new_empty(num_rows, grad_out.shape[1]), grad_weights


def _keep_for_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.num_tokens = inputs[0].shape[0]
    ctx.save_for_backward(output[2])


def _back_through_dispatch(ctx: Any, grad_rows: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
    return dispatch_backward(grad_rows, ctx.saved_tensors[0], ctx.num_tokens), None, None, None, None, None


def _keep_for_combine(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    y, topk_weights, ticket = inputs
    ctx.num_rows = y.shape[0]
    ctx.save_for_backward(y if ctx.needs_input_grad[1] else None, topk_weights, ticket)


def _back_through_combine(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    y, topk_weights, ticket = ctx.saved_tensors
    grad_y, grad_weights = combine_backward(grad_out, y, topk_weights, ctx.num_rows, ticket)
    return grad_y, None if y is None else grad_weights, None


dispatch.register_autograd(_back_through_dispatch, setup_context=_keep_for_dispatch)
combine.register_autograd(_back_through_combine, setup_context=_keep_for_combine)
