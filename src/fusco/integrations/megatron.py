"""Megatron-core: a layer of experts whose tokens move by fusco, for a layer spec; no ``deep_ep`` is needed.

For Megatron-core 0.16: ``spec = with_fusco(get_gpt_layer_local_spec(...))`` in the function that ``--spec`` names.
Sources of the interface: ``megatron/core/transformer/moe/{moe_layer,token_dispatcher}.py`` (BSD licence).
"""

from __future__ import annotations

import functools
from copy import copy
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization, get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec

from fusco.integrations.expert_rows import ExpertRows, SentRows, in_blocks
from fusco.integrations.routing_maps import map_to_indices


class FuscoTokenDispatcher(MoETokenDispatcher):
    """Megatron's six steps of a dispatch and a combine; those around the communication do nothing but reshape.

    Experts apply the weights of rows themselves, so ``token_combine`` adds rows up as they are.
    """

    def __init__(self, config: Any, pg_collection: Any) -> None:
        """Raises ``ValueError`` for what is not supported."""
        super().__init__(config=config, pg_collection=pg_collection)
        if self.tp_size > 1:
            raise ValueError(f"fusco's layer needs expert_tensor_parallel_size=1, got {self.tp_size}")
        if config.moe_shared_expert_overlap or config.moe_pad_expert_input_to_capacity:
            raise ValueError("fusco's layer has no moe_shared_expert_overlap and no moe_pad_expert_input_to_capacity")
        is_padded = config.moe_router_padding_for_quantization or config.moe_router_padding_for_fp8
        self._alignment = get_align_size_for_quantization(config) if is_padded else 1
        self._rows = ExpertRows.of_group(self.ep_group, config.num_moe_experts)
        self._shape = torch.Size()
        self._topk_idx: torch.Tensor | None = None
        self._sent: SentRows | None = None

    def dispatch_preprocess(
        self, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens (num_tokens, hidden) and the weights of their experts (num_tokens, num_topk)."""
        self._shape = tokens.shape
        tokens = tokens.view(-1, self._shape[-1])
        with self._rows.comms.rejecting():
            self._topk_idx = map_to_indices(routing_map.view(len(tokens), -1), self.config.moe_router_topk)
            return tokens, probs.view(len(tokens), -1).gather(1, self._topk_idx.clamp(min=0))

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send tokens to their experts; return the rows that arrived and their weights (num_rows,)."""
        assert self._topk_idx is not None, "dispatch_preprocess comes first"
        rows, ids, alignment = [hidden_states], self._topk_idx, self._alignment
        self._sent = self._rows.dispatch(rows, ids, probs.float(), expert_alignment=alignment)
        weights = self._sent.dispatched.weights
        assert weights is not None
        return self._sent.dispatched.rows, weights

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows, the rows of each local expert with padding, int64 in host memory, and weights."""
        assert self._sent is not None, "token_dispatch comes first"
        return hidden_states, in_blocks(self._sent.counts_on_host, self._alignment), probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the rows as they are."""
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the sums of each token's rows (num_tokens, hidden)."""
        assert self._sent is not None, "token_dispatch comes first"
        sent, self._sent = self._sent, None
        return sent.combine([hidden_states])[0]

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the sums in the shape of the layer's input."""
        return hidden_states.view(self._shape)


class FuscoMoELayer(MoELayer):
    """Megatron's layer of experts with ``FuscoTokenDispatcher``, whatever ``moe_token_dispatcher_type`` is."""

    def __init__(
        self, config: Any, submodules: Any = None, layer_number: Any = None, pg_collection: Any = None, **options: Any
    ) -> None:
        """As ``MoELayer``; ``options`` are those of later versions."""
        pg_collection = pg_collection or get_default_pg_collection()
        super().__init__(config, submodules, layer_number, pg_collection=pg_collection, **options)
        self.token_dispatcher = FuscoTokenDispatcher(self.config, pg_collection)


def with_fusco(spec: Any) -> Any:
    """Return a spec of a layer, or of a block of layers, with ``FuscoMoELayer`` for ``MoELayer``; others as they are.

    The spec is not changed. Raises ``ValueError`` if there is no layer of experts in it.
    """
    changed, num_changed = _with_fusco(spec)
    if not num_changed:
        raise ValueError(f"{type(spec).__name__} has no layer of experts (MoELayer)")
    return changed


def _with_fusco(spec: Any) -> tuple[Any, int]:
    if spec is MoELayer:
        return FuscoMoELayer, 1
    if isinstance(spec, functools.partial):
        function, num_changed = _with_fusco(spec.func)
        return functools.partial(function, *spec.args, **spec.keywords), num_changed
    if isinstance(spec, (list, tuple)):
        pairs = [_with_fusco(each) for each in spec]
        return type(spec)(each for each, _ in pairs), sum(number for _, number in pairs)
    names = (
        {"module", "submodules"} if isinstance(spec, ModuleSpec) else {"layer_specs", "mlp"} & _attributes(spec).keys()
    )
    changed, num_changed = copy(spec) if names else spec, 0
    for name in names:
        each, number = _with_fusco(getattr(spec, name))
        num_changed += number
        if number:
            setattr(changed, name, each)
    return changed, num_changed


def _attributes(spec: Any) -> dict[str, Any]:
    """Return the attributes of an object of submodules; none of a class or a plain value."""
    return {} if isinstance(spec, type) else getattr(spec, "__dict__", {})
