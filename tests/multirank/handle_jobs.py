"""Functions on ranks: handles used again, older ones, several communicators, padding."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from rank_setup import Setup, check_combine, law_of, pause_randomly, poison, poison_recycler

from comparison import assert_same_bits, world_rows
from generator import KINDS, any_bits, values


def check_reuse(group: dist.ProcessGroup, setup: Setup) -> None:
    """Use one handle for several dispatches and combines, before and after other routings."""
    with setup.open(group) as comm:
        poison_recycler(comm, setup)
        kept = []
        for seed in range(8):
            case = setup.case(KINDS[seed % len(KINDS)], seed, comm.topology.world_size)
            x = values((case.num_tokens(comm.rank), 3), torch.float32, seed, "x", comm.rank)
            handle = comm.dispatch(x, case.topk_idx(comm.rank), case.topk_weights(comm.rank)).handle
            kept.append((case, law_of(comm, case), handle))
        for round_ in range(3):
            for case, law, handle in kept[round_:] + kept[:round_]:
                weights = case.world_topk_weights()
                rows = [any_bits((case.num_tokens(r), 7), torch.uint8, round_, case.seed, r) for r in law.ranks]
                (again,) = comm.dispatch_again(rows[comm.rank], handle)
                assert_same_bits(again, law.rows(comm.rank, rows), "dispatch_again")
                y = world_rows(law, 4, torch.float32, round_)
                first = check_combine(comm, law, handle, weights, y)
                second = check_combine(comm, law, handle, weights, y)
                assert_same_bits(second, first, "the same combine twice")
                poison(again, first, second)


def check_alignment(group: dist.ProcessGroup, setup: Setup, alignments: list[int]) -> None:
    """Blocks padded with zeros; counts do not count padding, combine ignores it."""
    with setup.open(group) as comm:
        poison_recycler(comm, setup)
        for seed, alignment in enumerate(alignments * 3):
            case = setup.case(KINDS[seed % len(KINDS)], seed, comm.topology.world_size)
            law = law_of(comm, case, alignment)
            x = [any_bits((case.num_tokens(rank), 3), torch.int64, seed, "x", rank) for rank in law.ranks]
            ids, weights = case.topk_idx(comm.rank), case.topk_weights(comm.rank)
            padded = comm.dispatch(x[comm.rank], ids, weights, expert_alignment=alignment)
            assert_same_bits(padded.rows, law.rows(comm.rank, x), f"rows aligned to {alignment}")
            assert padded.num_rows_per_expert.tolist() == law.counts(comm.rank)
            y = world_rows(law, 3, torch.float32, seed)  # NaN in the padding
            poison(check_combine(comm, law, padded.handle, case.world_topk_weights(), y), padded.rows)


def check_two_communicators(group: dist.ProcessGroup, setups: list[Setup]) -> None:
    """Several communicators of one group, used in turn, and closed in another order."""
    with contextlib.ExitStack() as stack:
        comms = [stack.enter_context(setup.open(group)) for setup in setups]
        for comm, setup in zip(comms, setups, strict=True):
            poison_recycler(comm, setup)
        for seed in range(10):
            order = list(zip(comms, setups, strict=True))[:: 1 if seed % 2 else -1]
            under_way = []
            for comm, setup in order:
                case = setup.case(KINDS[seed % len(KINDS)], seed + 50 * len(under_way), comm.topology.world_size)
                law = law_of(comm, case)
                x = [any_bits((case.num_tokens(rank), 3), torch.float32, seed, "x", rank) for rank in law.ranks]
                dispatched = comm.dispatch(x[comm.rank], case.topk_idx(comm.rank), case.topk_weights(comm.rank))
                under_way.append((comm, law, case, x, dispatched))
            pause_randomly(comms[0].rank, seed, 5)
            for comm, law, case, x, dispatched in under_way:
                assert_same_bits(dispatched.rows, law.rows(comm.rank, x), "dispatch")
                y = world_rows(law, 3, torch.float32, seed)
                out = check_combine(comm, law, dispatched.handle, case.world_topk_weights(), y)
                poison(out, dispatched.rows)
        comms[0].close()


def outputs_after_close(group: dist.ProcessGroup, setup: Setup) -> tuple[bool, bool]:
    """Return True if outputs outlive their communicator, and True if their memory had been poisoned before."""
    case = setup.case("balanced", 1, dist.get_world_size(group))
    with setup.open(group) as comm:
        x = torch.ones(case.num_tokens(comm.rank), 4)
        first = comm.dispatch(x, case.topk_idx(comm.rank)).rows
        where = first.data_ptr()
        poison(first)
        del first
        rows = comm.dispatch(x, case.topk_idx(comm.rank)).rows
        is_recycled = rows.data_ptr() == where
    other = torch.zeros(1 << 20)
    return bool((rows == 1).all()) and not other.any(), is_recycled
