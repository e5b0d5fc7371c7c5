"""PyTorch twin of the CUDA kernel ``plan``: the slots of all ranks' rows on one rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusco.planner.dispatch_plan import ExpertDistribution

NOT_HERE = -1  # the pair's expert is on another rank, or there is none
DROPPED = -2  # the pair's expert is here, but its slot is beyond the last one


@dataclass(frozen=True, kw_only=True)
class PlannedSlots:
    """Slots of rows on one rank. Rows are the tokens of all ranks, by source rank."""

    row_to_slots: torch.Tensor  # int32 (num_rows, num_topk): the slot of each pair, ``NOT_HERE`` or ``DROPPED``
    num_rows_per_expert: torch.Tensor  # int64 (num_local_experts,), without padding and dropped pairs
    num_dropped_per_expert: torch.Tensor  # int32 (num_local_experts,)
    block_to_first_slot: torch.Tensor  # int32 (num_local_experts,)
    block_to_end_slot: torch.Tensor  # int32 (num_local_experts,): the end of each block and its padding of zeros
    # slots that all rows would fill, including padding, independent of ``max_slots``; with ``rows_per_expert``, rows of
    # the expert with the most
    num_slots_needed: int


def plan_slots(
    topk_idx: torch.Tensor,
    expert_to_local: torch.Tensor,
    num_local_experts: int,
    expert_alignment: int = 1,
    max_slots: int | None = None,
    rows_per_expert: int | None = None,
) -> PlannedSlots:
    """Assign a slot to each pair (row, k) with a local expert: blocks by local expert, in order of pairs inside.

    The kernel does the same, bit for bit, after it has gathered ``topk_idx`` from all ranks.

    Args:
        topk_idx: int32 or int64 (num_rows, num_topk), the expert ids of all ranks' tokens. An invalid id
            counts as none; only the kernel reports it.
        expert_to_local: int32 (num_experts,), the index among this rank's experts; -1 for experts of other ranks.
        num_local_experts: experts of this rank.
        expert_alignment: each block is rounded up to a multiple of this.
        max_slots: slots of the output; ``None`` means as many as needed.
        rows_per_expert: slots of each expert, instead: block ``e`` begins at slot ``e * rows_per_expert``.

    Two ranks with two experts each: this one owns experts 0 and 1, rows 0 and 1 are rank 0's tokens, row 2 rank 1's.

    >>> ids = torch.tensor([[1, 0], [1, 2], [0, -1]])
    >>> plan = plan_slots(ids, torch.tensor([0, 1, -1, -1], dtype=torch.int32), num_local_experts=2)
    >>> plan.row_to_slots.tolist()
    [[2, 0], [3, -1], [1, -1]]
    >>> plan.num_rows_per_expert.tolist(), plan.block_to_first_slot.tolist(), plan.num_slots_needed
    ([2, 2], [0, 2], 4)

    Blocks of a multiple of 4 in 5 slots: expert 1 begins at slot 4, and has no room for its second row.

    >>> table = torch.tensor([0, 1, -1, -1], dtype=torch.int32)
    >>> plan = plan_slots(ids, table, num_local_experts=2, expert_alignment=4, max_slots=5)
    >>> plan.row_to_slots.tolist()
    [[4, 0], [-2, -1], [1, -1]]
    >>> plan.num_rows_per_expert.tolist(), plan.block_to_first_slot.tolist(), plan.num_slots_needed
    ([2, 1], [0, 4], 8)

    With one slot for each expert, the last row of either is dropped; the expert with the most rows has two.

    >>> plan = plan_slots(ids, table, num_local_experts=2, rows_per_expert=1)
    >>> plan.row_to_slots.tolist()
    [[1, 0], [-2, -1], [-2, -1]]
    >>> plan.num_rows_per_expert.tolist(), plan.num_dropped_per_expert.tolist(), plan.num_slots_needed
    ([1, 1], [1, 1], 2)
    """
    num_experts = len(expert_to_local)
    is_expert = (topk_idx >= 0) & (topk_idx < num_experts)
    local_expert = torch.where(is_expert, expert_to_local[topk_idx.long().clamp(0, num_experts - 1)], NOT_HERE)

    pairs = assign_slots(local_expert, num_local_experts, expert_alignment, max_slots, rows_per_expert)
    row_to_slots = torch.where(local_expert >= 0, DROPPED, NOT_HERE)
    row_to_slots[pairs.pair_to_row, pairs.pair_to_k] = pairs.pair_to_slot.to(row_to_slots.dtype)
    return PlannedSlots(
        row_to_slots=row_to_slots.int(),
        num_rows_per_expert=pairs.num_rows_per_expert,
        num_dropped_per_expert=pairs.num_dropped_per_expert,
        block_to_first_slot=torch.tensor(pairs.block_to_first_slot, dtype=torch.int32, device=topk_idx.device),
        block_to_end_slot=torch.tensor(pairs.block_to_end_slot, dtype=torch.int32, device=topk_idx.device),
        num_slots_needed=pairs.num_slots_needed,
    )


def mark_ranks(topk_idx: torch.Tensor, expert_to_rank: torch.Tensor) -> torch.Tensor:
    """Return the ranks that own an expert of each token, as bits: the kernel's ``token_to_ranks`` of its rank's tokens.

    Args:
        topk_idx: int32 or int64 (num_tokens, num_topk), for this rank's tokens.
        expert_to_rank: int32 (num_experts,), below 32.

    Returns int32 (num_tokens,); bit ``r`` is set if rank ``r`` owns an expert of the token.

    >>> mark_ranks(torch.tensor([[1, 0], [1, 2], [-1, -1]]), torch.tensor([0, 0, 1, 1], dtype=torch.int32)).tolist()
    [1, 3, 0]
    """
    num_experts = len(expert_to_rank)
    is_expert = (topk_idx >= 0) & (topk_idx < num_experts)
    rank = torch.where(is_expert, expert_to_rank[topk_idx.long().clamp(0, num_experts - 1)].long(), NOT_HERE)
    marks = torch.zeros(len(topk_idx), dtype=torch.int64, device=topk_idx.device)
    for r in range(int(rank.max()) + 1 if rank.numel() else 0):
        marks |= (rank == r).any(1).long() << r
    return torch.where(marks >= 1 << 31, marks - (1 << 32), marks).int()  # the kernel's words are unsigned


def assign_slots(
    local_expert: torch.Tensor,
    num_local_experts: int,
    expert_alignment: int = 1,
    static_rows: int | None = None,
    rows_per_expert: int | None = None,
) -> ExpertDistribution:
    """Assign slots by a stable counting sort by expert, as the kernels ``plan`` and ``plan_pairs`` do.

    Blocks are in order of local expert, each rounded up to ``expert_alignment`` rows. Rows inside a block are in order
    of (source rank, token, k). With ``static_rows`` the output has that many rows, and pairs beyond them are dropped.
    With ``rows_per_expert`` each block has that many, and pairs beyond those of their block are dropped.
    ``local_expert``, int (M, K), is the index among this rank's experts; -1 for none or a remote one.

    >>> assign_slots(torch.tensor([[1, 0], [1, -1]]), num_local_experts=2).pair_to_slot.tolist()
    [1, 0, 2]
    >>> assign_slots(torch.tensor([[1, 0], [1, -1]]), num_local_experts=2, rows_per_expert=3).pair_to_slot.tolist()
    [3, 0, 4]
    """
    device = local_expert.device
    pair_to_row, pair_to_k = (local_expert >= 0).nonzero(as_tuple=True)
    pair_to_expert = local_expert[pair_to_row, pair_to_k]

    # Step 1: number of rows of each expert, and the first slot of its block and of the next.
    wanted = torch.bincount(pair_to_expert, minlength=num_local_experts)
    padded = (wanted + expert_alignment - 1) // expert_alignment * expert_alignment
    block_rows = padded if rows_per_expert is None else torch.full_like(padded, rows_per_expert)
    ends = block_rows.cumsum(0)
    firsts = ends - block_rows

    # Step 2: a stable sort by expert keeps (source rank, token, k) order inside a block.
    by_expert = torch.argsort(pair_to_expert, stable=True)
    first_pair = wanted.cumsum(0) - wanted
    sorted_expert = pair_to_expert[by_expert]
    position = torch.empty_like(pair_to_row)  # in the block
    position[by_expert] = torch.arange(len(by_expert), device=device) - first_pair[sorted_expert]
    pair_to_slot = firsts[pair_to_expert] + position

    # Step 3: drop what does not fit.
    if rows_per_expert is None:
        needed = int(padded.sum())
        num_slots = needed if static_rows is None else static_rows
        firsts, ends = firsts.clamp(max=num_slots), ends.clamp(max=num_slots)
        is_kept = pair_to_slot < num_slots
    else:
        needed = max(wanted.tolist(), default=0)
        num_slots = num_local_experts * rows_per_expert
        is_kept = position < rows_per_expert
    num_rows = torch.minimum(wanted, ends - firsts)
    return ExpertDistribution(
        pair_to_row[is_kept],
        pair_to_k[is_kept],
        pair_to_slot[is_kept],
        num_rows,
        (wanted - num_rows).int(),
        tuple(firsts.tolist()),
        tuple(torch.minimum(ends, firsts + padded).tolist()),
        needed,
        num_slots,
        rows_per_expert,
    )
