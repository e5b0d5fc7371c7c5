"""Communicator of one rank, compared with the twins of its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import fusco
from comparison import assert_same_bits, assert_within, world_rows
from generator import Case
from law import Law
from reference.combine_rows import combine_rows
from reference.plan import PlannedSlots, mark_ranks, plan_slots
from reference.scatter_rows import scatter_rows

NUM_EXPERTS, NUM_TOPK = 40, 32
MAX_TOKENS, MAX_BYTES_PER_TOKEN = 1500, 8192


def case_of(kind: str, seed: int, num_topk: int, max_tokens: int = 40) -> Case:
    """A routing of one rank that fits."""
    return Case(kind=kind, seed=seed, world_size=1, num_experts=NUM_EXPERTS, num_topk=num_topk, max_tokens=max_tokens)


def taken(output: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU. The device tensor is poisoned, so that no later call can use it."""
    copy = output.detach().to("cpu", copy=True)
    output.detach().view(-1).view(torch.uint8).fill_(0xFF)
    return copy


class OneRank:
    """A communicator of one rank. Every verb goes to the GPU, and what comes back is compared with the twins."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, **others: Any) -> None:
        sizes = {
            "num_experts": NUM_EXPERTS,
            "num_topk": NUM_TOPK,
            "max_tokens_per_rank": MAX_TOKENS,
            "max_bytes_per_token": MAX_BYTES_PER_TOKEN,
            "settings": fusco.Settings(timeout_s=30.0, slice_bytes=1 << 16),
        }
        self.comm = fusco.Communicator(group, device=device, **{**sizes, **others})
        self.device = device
        placement = self.comm.placement
        self._expert_to_local = placement.local_index_table(0, torch.device("cpu"))[:-1].int()
        self._expert_to_rank = torch.tensor(placement.expert_to_rank, dtype=torch.int32)

    def __enter__(self) -> OneRank:
        return self

    def __exit__(self, *exception: object) -> None:
        self.comm.close()

    def plan(
        self, case: Case, alignment: int = 1, max_slots: int | None = None, rows_per_expert: int | None = None
    ) -> PlannedSlots:
        """The twin's plan."""
        limits = max_slots, rows_per_expert
        return plan_slots(case.topk_idx(0), self._expert_to_local, NUM_EXPERTS, alignment, *limits)

    def dispatch(
        self,
        case: Case,
        payloads: Sequence[torch.Tensor],
        *,
        alignment: int = 1,
        ids_dtype: torch.dtype = torch.int64,
        weights_dtype: torch.dtype | None = torch.float32,
        static: fusco.StaticRows | None = None,
        launch: fusco.Launch | None = None,
    ) -> fusco.Handle:
        """Dispatch payloads, given on the CPU, and compare everything that comes of it, bit for bit."""
        weights = None if weights_dtype is None else case.topk_weights(0, weights_dtype)
        sent = self.comm.dispatch(
            [payload.to(self.device) for payload in payloads],
            case.topk_idx(0).to(ids_dtype).to(self.device),
            None if weights is None else weights.to(self.device),
            expert_alignment=alignment,
            static=static,
            launch=launch,
        )
        self.comm.wait()
        limits = (static.num_rows, static.rows_per_expert) if static else ()
        plan = self.plan(case, alignment, *limits)
        self.check_plan(case, plan, sent.handle)
        assert_same_bits(sent.num_rows_per_expert.cpu(), plan.num_rows_per_expert, "num_rows_per_expert")
        on_host = sent.num_rows_per_expert_on_host
        assert on_host is None if static else on_host.tolist() == plan.num_rows_per_expert.tolist()
        assert sent.handle.num_rows == (static.num_slots(NUM_EXPERTS) if static else plan.num_slots_needed)
        self.check_rows(sent.payloads, payloads, plan)
        return sent.handle

    def check_plan(self, case: Case, plan: PlannedSlots, handle: fusco.Handle) -> None:
        """Compare what the kernel ``plan`` wrote."""
        made: Any = handle.plan.tables
        assert_same_bits(made.row_to_slots.cpu(), plan.row_to_slots, "row_to_slots")
        for name in ("block_to_first_slot", "block_to_end_slot", "num_dropped_per_expert"):
            assert_same_bits(getattr(made, name).cpu(), getattr(plan, name), name)
        assert made.num_rows_needed.tolist() == [plan.num_slots_needed]
        marks = mark_ranks(case.topk_idx(0), self._expert_to_rank)
        assert_same_bits(made.token_to_ranks.cpu(), marks, "token_to_ranks")
        if made.weights is not None:
            assert_same_bits(made.weights.cpu(), case.topk_weights(0, made.weights.dtype), "weights")

    def check_rows(self, outputs: Sequence[torch.Tensor], payloads: Sequence[torch.Tensor], plan: PlannedSlots) -> None:
        """Compare expert-major rows; those behind blocks are undefined."""
        blocks = zip(plan.block_to_first_slot.tolist(), plan.block_to_end_slot.tolist(), strict=True)
        written = torch.cat([torch.arange(*block) for block in blocks])
        num_slots = int(plan.block_to_end_slot[-1])
        assert len(outputs) == len(payloads)
        for i, (output, payload) in enumerate(zip(outputs, payloads, strict=True)):
            expected = scatter_rows(payload, plan.row_to_slots, num_slots)
            rows = taken(output)
            rows = rows.flatten(0, 1) if rows.ndim > payload.ndim else rows
            assert_same_bits(rows[written], expected[written], f"payload {i}")

    def combine(
        self,
        case: Case,
        handle: fusco.Handle,
        hidden: int,
        dtype: torch.dtype,
        *,
        alignment: int = 1,
        is_weighted: bool = True,
        launch: fusco.Launch | None = None,
    ) -> None:
        """Combine rows as experts might give them, and compare with the twin and with the law."""
        law = Law([case.topk_idx(0)], self.comm.placement.expert_to_rank, alignment)
        (y,) = world_rows(law, hidden, dtype, case.seed)
        has_weights = is_weighted and handle.is_weighted
        weights = case.topk_weights(0, handle.topk_weights.dtype) if has_weights else None
        out = self.comm.combine(y.to(self.device), handle, weights="topk" if is_weighted else None, launch=launch)
        self.comm.wait()
        assert out.dtype == dtype
        out = taken(out)
        expected = self.twin_of_combine(case, y, self.plan(case, alignment), weights)
        sums = law.sums(0, [y], None if weights is None else [weights], (0,))
        assert_same_bits(out, expected, "combine and its twin")
        assert_within(out, sums.exact, law.error_bound(sums, dtype, None), "combine and the law")

    def twin_of_combine(
        self, case: Case, y: torch.Tensor, plan: PlannedSlots, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """What combine must give."""
        marks = mark_ranks(case.topk_idx(0), self._expert_to_rank)
        return combine_rows(y, plan.row_to_slots, weights, {}, marks, rank=0)
