"""Size of an exactly sized output that is known before the plan is made, and whether it is worth its memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from fusco.core.rows import wants_grad
from fusco.cuda.within_node.device_plan import DevicePlan
from fusco.engine.base import DispatchRequest

# Rows of a bound that are not needed take memory as long as the output lives: without gradients, to the end of a layer.
# Chosen for a prefill of 8192 tokens of hidden 2048 on 2 ranks, top-8, bf16: 256 MiB. Without a bound the device was
# idle between plan and rows there, for 63 us a layer (2 H200).
MAX_EXTRA_BYTES = 512 << 20
# Outputs that gradients need live until the backward pass, one for each layer.
MAX_EXTRA_BYTES_WITH_GRADIENTS = 16 << 20


@lru_cache(maxsize=1024)
def affordable_bound(
    num_pairs: int, num_local_experts: int, expert_alignment: int, num_ranks: int, row_bytes: int, *, needs_grad: bool
) -> int | None:
    """Return the maximum number of rows of a dispatch on one rank, or ``None`` if they may take too much memory.

    The maximum is every pair, of all ranks, and the padding of every block. What of it is not needed is estimated for
    balanced routing, of which each rank gets an equal share. ``row_bytes`` are those of all payloads together, and
    ``needs_grad`` says whether the output is kept for gradients.

    >>> affordable_bound(16, 4, 8, 1, 14336, needs_grad=True)
    44
    >>> affordable_bound(8192, 32, 1, 8, 14336, needs_grad=False)
    8192
    >>> affordable_bound(8192, 32, 1, 8, 14336, needs_grad=True) is None
    True
    >>> affordable_bound(131072, 64, 1, 2, 4096, needs_grad=False)
    131072
    >>> affordable_bound(65536, 32, 1, 8, 14336, needs_grad=False) is None
    True
    """
    bound = num_pairs + min(num_pairs, num_local_experts) * (expert_alignment - 1)
    extra_bytes = (bound - num_pairs // num_ranks) * row_bytes
    return bound if extra_bytes <= (MAX_EXTRA_BYTES_WITH_GRADIENTS if needs_grad else MAX_EXTRA_BYTES) else None


def affordable_bound_of(plan: DevicePlan, request: DispatchRequest, row_bytes: Sequence[int]) -> int | None:
    """Return the rows of an output that is large enough for any plan of this size; see ``affordable_bound``."""
    shape = plan.tables.shape
    needs_grad = wants_grad(request.payloads[0])  # of several payloads none does
    return affordable_bound(
        shape.num_rows * shape.num_topk,
        shape.num_local_experts,
        request.expert_alignment,
        len(plan.first_row) - 1,
        sum(row_bytes),
        needs_grad=needs_grad,
    )
