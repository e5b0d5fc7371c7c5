"""The loss that balances routers, of the tokens of all ranks, in models that transformers has distributed."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

_NAME = "load_balancing_loss_func"  # in modules of transformers' models; 34 kinds have the same (5.24)
_OF_OTHERS = "transformers.models.mixtral.modeling_mixtral"  # whose loss TRL (1.16) takes for all models
_RTOL = 1e-5


def balance_loss(
    gate_logits: Sequence[torch.Tensor] | None,
    num_experts: int,
    top_k: int = 2,
    attention_mask: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor | int:
    """Return E * sum of f_e * p_e over experts, of the tokens of all ranks; a collective of the group.

    f_e is the share of tokens that are sent to an expert, p_e its mean probability (Switch Transformers, equations 4 to
    6). Both are means over the tokens of all layers, and of all ranks of the group; on one rank this is
    ``load_balancing_loss_func`` of transformers. Gradients are those whose *mean* over ranks is the gradient of this
    loss, as transformers' data parallelism needs.

    Args:
        gate_logits: of each layer, (num_tokens, num_experts).
        num_experts: E.
        top_k: experts of a token.
        attention_mask: (num_sequences, length), 0 for tokens that do not count; ``None`` counts all.
        group: ``None`` means this rank alone.

    Returns:
        A scalar in float32; 0 without logits.
    """
    if not isinstance(gate_logits, tuple):
        return 0
    device = gate_logits[0].device
    sums = torch.zeros(2, num_experts, dtype=torch.float32, device=device)  # of choices, and of probabilities
    num_tokens = torch.zeros((), dtype=torch.float32, device=device)
    for logits in gate_logits:
        probabilities = logits.to(device).softmax(dim=-1)
        chosen = probabilities.topk(top_k, dim=-1).indices
        counts = torch.zeros_like(probabilities, dtype=torch.float32).scatter_(1, chosen, 1.0)
        weights = torch.ones(len(logits), dtype=torch.float32, device=device)
        if attention_mask is not None:
            weights = attention_mask.reshape(-1).to(weights)
        sums = sums + torch.stack([weights @ counts, weights @ probabilities.float()])
        num_tokens = num_tokens + weights.sum()
    (choices, probability) = sums.unbind()
    if group is not None and group.size() > 1:
        everywhere = torch.cat([sums.detach().flatten(), num_tokens[None]])
        dist.all_reduce(everywhere, group=group)
        num_tokens, choices, whole = everywhere[-1], everywhere[:num_experts], everywhere[num_experts:-1]
        probability = whole + group.size() * (probability - probability.detach())
    return num_experts * (choices.detach() / num_tokens * (probability / num_tokens)).sum()


class RouterLosses:
    """Replaces the router losses of distributed models, for the duration of a block.

    Other models of the same classes in the process keep theirs: a loss is of all ranks' tokens only if distributed
    experts have run since the loss before it.
    """

    def __init__(self) -> None:
        self._patched: dict[str, Any] = {}
        self._has_run = False

    def watch(self, experts: nn.Module) -> None:
        """Replace the loss in the module that defines the class of these experts, and notice when they run."""
        if not hasattr(sys.modules.get(type(experts).__module__), _NAME):
            return
        experts.register_forward_pre_hook(self._notice)
        for name in {type(experts).__module__, _OF_OTHERS} - self._patched.keys():
            module = importlib.import_module(name)
            original = getattr(module, _NAME)
            if _is_known(original):
                self._patched[name] = mock.patch.object(module, _NAME, self._replacement(original))
                self._patched[name].start()
            else:
                warnings.warn(
                    f"{name}.{_NAME} computes another loss than fusco knows: it stays that of each rank's tokens",
                    stacklevel=2,
                )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the losses of transformers at the end of the block."""
        try:
            yield
        finally:
            for patch in self._patched.values():
                patch.stop()
            self._patched.clear()

    def _notice(self, *_: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # noqa: SLF001  not while a backward pass recomputes
            self._has_run = True

    def _replacement(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def loss(*args: Any, **kwargs: Any) -> Any:
            if not self._has_run:
                return original(*args, **kwargs)
            self._has_run = False
            return balance_loss(*args, **kwargs, group=dist.group.WORLD)

        return loss


def _is_known(original: Callable[..., Any]) -> bool:
    """Return whether transformers' function computes what ``balance_loss`` computes on one rank."""
    generator = torch.Generator("cpu").manual_seed(1)
    logits = tuple(torch.randn((6, 4), generator=generator, dtype=torch.float32, device="cpu") for _ in range(2))
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], device="cpu")
    try:
        return all(
            torch.allclose(original(logits, 4, 2, each), torch.as_tensor(balance_loss(logits, 4, 2, each)), rtol=_RTOL)
            for each in (None, mask)
        )
    except Exception:  # noqa: BLE001  another signature, say
        return False
