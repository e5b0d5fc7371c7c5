"""What ``dispatch`` gives, and what it remembers for ``combine``, for gradients, and for dispatching again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fusco.engine.base import Plan


@dataclass(frozen=True)
class Handle:
    """A routing, planned. It belongs to the communicator that made it and is good for any number of calls.

    Attributes:
        plan: both levels of descriptors, as this rank executes them.
        topk_weights: the caller's weights (num_tokens, num_topk), to which gradients flow; ``None`` if none were given,
            or after ``unweighted()``.
        number: the collective that planned it; ranks that use a handle together compare it.

    """

    plan: Plan
    topk_weights: torch.Tensor | None
    number: int

    def unweighted(self) -> Handle:
        """The same routing for a ``combine`` that adds rows up as they are: their experts applied the weights."""
        return replace(self, topk_weights=None)

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""
        return self.plan.num_tokens

    @property
    def num_topk(self) -> int:
        """Expert slots of a token."""
        return self.plan.num_topk

    @property
    def num_rows(self) -> int:
        """Expert-major rows of this rank, padding counted."""
        return self.plan.num_slots

    @property
    def is_weighted(self) -> bool:
        """Whether ``combine`` applies weights."""
        return self.topk_weights is not None

    @property
    def weights(self) -> torch.Tensor | None:
        """The weights that ``combine`` applies, in the plan's order."""
        return self.plan.weights if self.is_weighted else None


@dataclass(frozen=True)
class Dispatched:
    """What ``dispatch`` gives.

    Attributes:
        rows: expert-major rows (num_rows, ...), of the payload's dtype. Blocks stand in order of local expert, rows
            inside in order of (source rank, token, k). Padding inside the blocks is zero; rows of static output behind
            the last block are uninitialised.
        num_rows_per_expert: int64 (num_local_experts,) on the device of the rows, padding not counted.
        weights: the weight of each row (num_rows,), if asked for.
        handle: for ``combine``, or to dispatch other payloads along the same routing.
        more_rows: likewise the rows of the second payload and of those after it.

    """

    rows: torch.Tensor
    num_rows_per_expert: torch.Tensor
    weights: torch.Tensor | None
    handle: Handle
    more_rows: tuple[torch.Tensor, ...] = ()
