"""Functions on ranks: experts in several places, placements that are replaced."""

from __future__ import annotations

import torch
import torch.distributed as dist
from rank_setup import Setup, check_combine, digest, law_of, poison, poison_recycler

from comparison import assert_same_bits, world_rows
from fusco import ExpertPlacement, StaticRows
from generator import KINDS, any_bits, random_places

HIDDEN = 5


def placement_of(setup: Setup, num_ranks: int, seed: int) -> ExpertPlacement:
    """Return a random placement, with shares for every other seed."""
    places = -(-setup.num_experts // num_ranks) + 2
    given = random_places(num_ranks, places, setup.num_experts, has_shares=bool(seed % 2), seed=seed)
    return ExpertPlacement.replicated(*given, num_experts=setup.num_experts)


def check_replicas(group: dist.ProcessGroup, setup: Setup, seeds: range, *, is_static: bool = False) -> None:
    """Dispatch and combine with a placement that is replaced before every third call; earlier handles stay usable."""
    with setup.open(group) as comm:
        poison_recycler(comm, setup)
        kept = []
        for seed in seeds:
            if seed % 3 == 2:
                placement = placement_of(setup, comm.topology.world_size, seed)
                comm.place(placement)
                assert comm.placement == placement
            case = setup.case(KINDS[seed % len(KINDS)], seed, comm.topology.world_size)
            alignment = 1 + 7 * (seed % 5 == 4)
            law = law_of(comm, case, alignment)
            x = [any_bits((case.num_tokens(rank), HIDDEN), torch.float32, seed, "x", rank) for rank in law.ranks]
            ids = case.topk_idx(comm.rank).to(torch.int32 if seed % 2 else torch.int64)
            static = StaticRows(len(law.slots(comm.rank)) + 3) if is_static else None
            sent = comm.dispatch(
                x[comm.rank], ids, case.topk_weights(comm.rank), expert_alignment=alignment, static=static
            )
            expected = law.rows(comm.rank, x)
            assert_same_bits(sent.rows[: len(expected)], expected, f"dispatch {seed}")
            assert sent.num_rows_per_expert.tolist() == law.counts(comm.rank)
            kept = [*kept[-3:], (case, law, sent.handle)]
            if not is_static:
                _check_handles(comm, kept, seed)
            poison(sent.rows)


def _check_handles(comm, kept, seed) -> None:
    for case, law, handle in kept:
        rows = [any_bits((case.num_tokens(r), 7), torch.uint8, seed, case.seed, r) for r in law.ranks]
        (again,) = comm.dispatch_again(rows[comm.rank], handle)
        assert_same_bits(again, law.rows(comm.rank, rows), "dispatch_again")
        y = world_rows(law, 4, torch.float32, seed)
        poison(check_combine(comm, law, handle, case.world_topk_weights(), y), again)


def rows_of_experts(group: dist.ProcessGroup, setup: Setup, seed: int) -> list[str]:
    """Return digests of the rows of every expert of this rank, for a caller that compares placements."""
    digests = []
    with setup.open(group) as comm:
        case = setup.case("skewed", seed, comm.topology.world_size)
        x = any_bits((case.num_tokens(comm.rank), HIDDEN), torch.float32, seed, "x", comm.rank)
        sent = comm.dispatch(x, case.topk_idx(comm.rank))
        first = 0
        for expert, number in zip(
            comm.placement.rank_to_experts[comm.rank], sent.num_rows_per_expert.tolist(), strict=True
        ):
            digests += [f"{expert} {digest(row)}" for row in sent.rows[first : first + number]]
            first += number
    return digests


def gradients(group: dist.ProcessGroup, setup: Setup, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return output, and the gradients of rows and weights, of experts that scale rows by their number plus one."""
    with setup.open(group) as comm:
        case = setup.case("ragged with holes", seed, comm.topology.world_size, 4)
        random = torch.Generator().manual_seed(seed + comm.rank)
        x = torch.randn(case.num_tokens(comm.rank), HIDDEN, generator=random, dtype=torch.float64).requires_grad_()
        weights = case.topk_weights(comm.rank, torch.float64).requires_grad_()
        sent = comm.dispatch(x, case.topk_idx(comm.rank), weights)
        experts = torch.tensor(comm.placement.rank_to_experts[comm.rank], dtype=torch.float64)
        y = sent.rows * experts.repeat_interleave(sent.num_rows_per_expert)[:, None].add(1.0)
        out = comm.combine(y, sent.handle)
        (out.square().sum()).backward()
        return out.detach(), x.grad, weights.grad


def mistakes(group: dist.ProcessGroup, setup: Setup) -> list[str]:
    """Return the errors of placements that differ or do not fit, and of invalid ids; it stays usable."""
    errors = []
    with setup.open(group) as comm:
        num_ranks = comm.topology.world_size
        right = placement_of(setup, num_ranks, 1)
        other = placement_of(setup, num_ranks, 3)
        case = setup.case("balanced", 1, num_ranks)
        x, ids = torch.zeros(case.num_tokens(comm.rank), HIDDEN), case.topk_idx(comm.rank)
        wrong = ids.clone()
        wrong[3, 0] = setup.num_experts + 2

        def attempt(call, *arguments):
            try:
                call(*arguments)
                errors.append("")
            except Exception as error:  # noqa: BLE001  compared by the test
                errors.append(f"{type(error).__name__}: {error}")

        attempt(comm.place, right if comm.rank else other)
        attempt(comm.place, "no placement" if comm.rank == 1 else right)
        attempt(comm.dispatch, x, wrong if comm.rank == 1 else ids)
        attempt(comm.place, right)  # with shares
        attempt(comm.dispatch, x, wrong if comm.rank == 1 else ids)
        attempt(comm.dispatch, x, [] if comm.rank == 1 else ids)
        attempt(comm.dispatch, x[:-1] if comm.rank == 1 else x, ids)
        law = law_of(comm, case)
        assert comm.dispatch(x, ids).num_rows_per_expert.tolist() == law.counts(comm.rank)
    return errors
