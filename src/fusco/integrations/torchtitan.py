"""torchtitan: a token dispatcher on fusco, by torchtitan's own override mechanism.

For torchtitan 0.3: ``--override.imports 'fusco.integrations.torchtitan.dispatcher={"max_tokens_per_rank": 8192}'``
replaces every ``AllToAllTokenDispatcher``. Rows are the same bits; torchtitan's permutations, before and after its
all-to-all, disappear. Source of the interface: torchtitan 0.3.0, ``models/common/token_dispatcher.py`` and
``config/override.py`` (BSD licence).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torchtitan.config.override import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, BaseEPTokenDispatcher

from fusco.core.config import FSDP_SMS, Launch
from fusco.fsdp import SHUFFLE_OPS, Arrival, FuscoDispatcher

# Module state: all layers of a group share one, and the memory of its communicators. Each layer keeps it alive.
_shared: WeakValueDictionary[tuple[dist.ProcessGroup, int, int], FuscoDispatcher] = WeakValueDictionary()


class FuscoTokenDispatcher(BaseEPTokenDispatcher):
    """Dispatch and combine on a fusco communicator of all layers, which is made when the first tokens come.

    Scores are applied by ``combine``, and their gradient comes out of its backward pass.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        """Configuration."""

        # of a rank in a step: batch size times sequence length, over the ranks that share a sequence
        max_tokens_per_rank: int
        num_sms: int = FSDP_SMS  # SMs of a call

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._max_tokens_per_rank, self._num_sms = config.max_tokens_per_rank, config.num_sms
        self._dispatcher: FuscoDispatcher | None = None

    def init_buffer(self) -> None:
        """Make the dispatcher of the expert-parallel ranks, or take that of an earlier layer."""
        if self.ep_mesh is None:
            return
        key = group, max_tokens, num_sms = self.ep_mesh.get_group(), self._max_tokens_per_rank, self._num_sms
        self._dispatcher = _shared.get(key) or FuscoDispatcher(group, max_tokens, launch=Launch(num_sms=num_sms))
        _shared[key] = self._dispatcher

    def dispatch(
        self,
        x_TD: torch.Tensor,  # noqa: N803  torchtitan's names
        topk_scores_TK: torch.Tensor,  # noqa: N803
        topk_expert_ids_TK: torch.Tensor,  # noqa: N803
        num_local_tokens_per_expert_E: torch.Tensor,  # noqa: N803
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Send tokens (num_tokens, hidden) to their experts.

        Scores and int64 ids are (num_tokens, num_topk), this rank's tokens of each expert int64 (num_experts,). Returns
        rows (num_rows, hidden) by local expert, the rows of each local expert, int64, and what ``combine`` needs.
        """
        if self._dispatcher is None:  # one expert-parallel rank
            args = (x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E)
            return super(BaseEPTokenDispatcher, self).dispatch(*args)
        arrival = self._dispatcher.dispatch(x_TD, topk_expert_ids_TK, topk_scores_TK, self.num_experts)
        return arrival.rows, arrival.num_rows_per_expert, arrival

    def combine(
        self,
        routed_output_RD: torch.Tensor,  # noqa: N803
        metadata: Any,
        x_TD: torch.Tensor,  # noqa: N803
    ) -> torch.Tensor:
        """Return the weighted sums of the experts' rows (num_tokens, hidden)."""
        if self._dispatcher is None:
            return super(BaseEPTokenDispatcher, self).combine(routed_output_RD, metadata, x_TD)
        if not isinstance(metadata, Arrival):
            self._dispatcher.refuse(f"metadata must be what dispatch returned, got {type(metadata).__name__}")
        return self._dispatcher.combine(routed_output_RD, metadata)


@override(
    target=AllToAllTokenDispatcher.Config,
    exact=True,  # a subclass pads rows, which fusco's dispatcher does not
    description="expert-parallel dispatch and combine by fusco",
)
def dispatcher(config: Any, *, max_tokens_per_rank: int, num_sms: int = FSDP_SMS) -> Any:
    """Return the configuration of ``FuscoTokenDispatcher``; for ``--override.imports``."""
    return derive(config, FuscoTokenDispatcher.Config, max_tokens_per_rank=max_tokens_per_rank, num_sms=num_sms)


class FuscoSelectiveAC(SelectiveAC):
    """torchtitan's selective activation checkpointing, which also keeps what fusco's dispatch and combine return."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """That of ``SelectiveAC``."""

    def get_save_ops(self) -> set[Any]:
        """Return the operations whose outputs are kept, fusco's among them."""
        return {*super().get_save_ops(), *SHUFFLE_OPS}
