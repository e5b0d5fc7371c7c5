"""Size of an exactly sized output that is known before the plan is made, and whether it is worth its memory."""

from __future__ import annotations

# Rows of a bound that are not needed take memory as long as the output lives. Outputs that gradients need live until
# the backward pass, one for each layer. Chosen for 8 ranks of 128 tokens of hidden 7168, top-8, bf16: 98 MiB.
MAX_EXTRA_BYTES, MAX_EXTRA_BYTES_WITH_GRADIENTS = 128 << 20, 16 << 20


def bound_of_rows(num_pairs: int, num_local_experts: int, expert_alignment: int) -> int:
    """Return the maximum number of rows of a dispatch on one rank: every pair, and the padding of every block.

    Args:
        num_pairs: tokens of all ranks, times experts per token.
        num_local_experts: experts of this rank.
        expert_alignment: every block with rows is padded to a multiple of this.

    >>> bound_of_rows(16, 4, 1), bound_of_rows(16, 4, 8), bound_of_rows(2, 4, 8)
    (16, 44, 16)

    """
    return num_pairs + min(num_pairs, num_local_experts) * (expert_alignment - 1)


def is_bound_affordable(bound: int, num_pairs: int, num_ranks: int, row_bytes: int, *, needs_grad: bool) -> bool:
    """Return whether an output of ``bound`` rows may be allocated, of which the plan will say how many are needed.

    What is not needed is estimated for balanced routing, of which each rank of ``num_ranks`` gets an equal share.

    >>> is_bound_affordable(1024, 1024, 1, 14336, needs_grad=True)  # one rank gets all rows
    True
    >>> is_bound_affordable(8192, 8192, 8, 14336, needs_grad=False), is_bound_affordable(
    ...     65536, 65536, 8, 14336, needs_grad=False
    ... )
    (True, False)
    """
    extra_bytes = (bound - num_pairs // num_ranks) * row_bytes
    return extra_bytes <= (MAX_EXTRA_BYTES_WITH_GRADIENTS if needs_grad else MAX_EXTRA_BYTES)
