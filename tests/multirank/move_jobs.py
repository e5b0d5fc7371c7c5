"""Functions on ranks: experts that move between random placements, to other ranks, in steps, and as copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mistake_jobs import Outcome, attempt, check_that_it_works
from rank_setup import Setup

import fusco
from comparison import assert_same_bits
from fusco.placement import Balance, plan_batch
from generator import any_bits, values

# Dtypes and shapes of an expert's weights, such as FP8 values and their scales; one has no bytes.
EXPERTS: list[list[tuple[torch.dtype, tuple[int, ...]]]] = [
    [(torch.float32, (3, 5))],
    [(torch.float8_e4m3fn, (16, 9)), (torch.float32, (2,)), (torch.uint8, ())],
    [(torch.bfloat16, (40, 33)), (torch.float16, (0,)), (torch.int64, (1, 2))],
    [],
]
Places = np.ndarray


def expert(kind: Sequence[tuple[torch.dtype, tuple[int, ...]]], number: int) -> list[torch.Tensor]:
    """Return the weights of an expert, the same on every rank."""
    return [any_bits((1, *shape), dtype, "expert", number, i)[0] for i, (dtype, shape) in enumerate(kind)]


def in_places(kind: Sequence[Any], row: np.ndarray, num_places: int, device: str = "cpu") -> list[torch.Tensor]:
    """Return tensors (P, ...) on a device with the experts of a rank; places without one have random bits."""
    tensors = [any_bits((num_places, *shape), dtype, "nothing", i) for i, (dtype, shape) in enumerate(kind)]
    for place, number in enumerate(row):
        for tensor, weights in zip(tensors, expert(kind, number), strict=True):
            if number >= 0:
                copy_bits(tensor[place], weights)
    return [tensor.to(device) for tensor in tensors]


def copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    target.view(-1).view(torch.uint8).copy_(source.reshape(-1).view(torch.uint8))


def random_places(random: np.random.Generator, num_ranks: int, experts: Sequence[int], num_places: int) -> Places:
    """Draw a placement with some empty places; a rank may have an expert twice."""
    places = random.choice([*experts, -1], (num_ranks, num_places))
    return np.where(random.random(places.shape) < 0.1, -1, places)


def check_moves(group: dist.ProcessGroup, setup: Setup, seed: int, num_moves: int) -> None:
    """Move between random placements in place, one after the other, some of them in small steps."""
    with setup.open(group) as comm:
        num_ranks = comm.topology.world_size
        for number in range(num_moves):
            random, kind = np.random.default_rng((seed, number)), EXPERTS[number % len(EXPERTS)]
            old = random_places(random, num_ranks, range(2 * num_ranks), 4)
            placed = sorted({*old.ravel().tolist()} - {-1})
            new = random_places(random, num_ranks, placed, int(random.integers(1, 6)))
            weights = in_places(kind, old[comm.rank], 6, setup.device)
            untouched = in_places(kind, old[comm.rank], 6)
            if number % 2:
                comm.move_experts(weights, old, new)
            else:
                task = comm.start_moving_experts(weights, old, new, pace=fusco.Pace(step_bytes=700))
                while not task.step():
                    assert_same(weights, untouched, "before the end")
                assert task.is_done
                assert task.progress == 1
                assert task.step()
            kept = [*new[comm.rank], *[-1] * (6 - new.shape[1])]
            expected = in_places(kind, np.array(kept), 6)
            for place in (place for place, number in enumerate(kept) if number < 0):
                for tensor, before in zip(expected, untouched, strict=True):
                    copy_bits(tensor[place], before[place])
            assert_same(weights, expected, f"{old.tolist()} to {new.tolist()}")
        check_that_it_works(comm, setup)


def assert_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str) -> None:
    for i, (tensor, other) in enumerate(zip(found, expected, strict=True)):
        assert_same_bits(tensor.cpu(), other, f"{what}, tensor {i}")


def refit(group: dist.ProcessGroup, setup: Setup, num_trainers: int, is_apart: bool) -> None:
    """Move from the first ranks to the others (``is_apart``) or to all, which have other numbers of places."""
    rank, num_ranks, num_experts = dist.get_rank(group), dist.get_world_size(group), 12
    old, new = (np.full((num_ranks, 12), -1) for _ in range(2))
    for number in range(num_experts):
        old[number % num_trainers, number // num_trainers] = number
    first = num_trainers if is_apart else 0
    for number in range(num_experts):
        new[first + number // 2 % (num_ranks - first), number % 2 + 2 * (number // 2 // (num_ranks - first))] = number
    kind = EXPERTS[1]
    weights = in_places(kind, old[rank], 12, setup.device) if (old[rank] >= 0).any() else None
    targets = in_places(kind, new[rank] * 0 - 1, 12, setup.device) if (new[rank] >= 0).any() else None
    fusco.move_experts(weights, old, new, targets=targets, group=group)
    if weights is not None:
        assert_same(weights, in_places(kind, old[rank], 12), "sources")
    if targets is not None:
        assert_same(targets, in_places(kind, new[rank], 12), "targets")


def check_network_bytes(group: dist.ProcessGroup, setup: Setup) -> None:
    """An expert that all ranks get crosses to each other node once, in one step and in many."""
    with setup.open(group) as comm:
        num_ranks, num_nodes = comm.topology.world_size, comm.topology.num_nodes
        old, new = np.full((num_ranks, 2), -1), np.full((num_ranks, 2), -1)
        old[:, 0], new[:, 0], new[:, 1] = range(num_ranks), range(num_ranks), 1
        for step_bytes in (1 << 20, 512):
            weights = in_places(EXPERTS[2], old[comm.rank], 2, setup.device)
            task = comm.start_moving_experts(weights, old, new, pace=fusco.Pace(step_bytes=step_bytes))
            num_sent = 0
            while task.progress < 1 - 1.5 / (task.num_steps + 1):
                task.step()
                num_sent += comm.profile.internode_row_bytes
            task.wait()
            total = torch.tensor(num_sent)
            dist.all_reduce(total, group=group)
            assert total == (num_nodes - 1) * sum(tensor[0].nbytes for tensor in weights)
            assert_same(weights, in_places(EXPERTS[2], new[comm.rank], 2), "an expert for all")


def hold_back(group: dist.ProcessGroup, setup: Setup) -> tuple[int, int]:
    """Pause on one rank, which holds all of them back; return the steps while paused, and those at a small share."""
    with setup.open(group) as comm:
        num_ranks = comm.topology.world_size
        old = np.arange(num_ranks)[:, None]
        new = np.roll(old, 1, axis=0)
        weights = in_places(EXPERTS[2], old[comm.rank], 1, setup.device)
        task = comm.start_moving_experts(weights, old, new, pace=fusco.Pace(step_bytes=512))
        if comm.rank == num_ranks - 1:
            task.pause()
        for _ in range(3):
            assert not task.step()
            check_that_it_works(comm, setup)
        while_paused = task.progress
        assert_same(weights, in_places(EXPERTS[2], old[comm.rank], 1), "paused")
        task.wait()
        assert_same(weights, in_places(EXPERTS[2], new[comm.rank], 1), "resumed")
        slow = comm.start_moving_experts(weights, new, old, pace=fusco.Pace(step_bytes=512, share=1e-6))
        for _ in range(4):
            slow.step()
        held_at = slow.progress
        slow.wait()
        assert_same(weights, in_places(EXPERTS[2], old[comm.rank], 1), "at a small share")
        return round(while_paused * (task.num_steps + 1)), round(held_at * (slow.num_steps + 1))


def counted_rows(group: dist.ProcessGroup, setup: Setup, rows: Sequence[int]) -> list[int]:
    """Plan a batch in which this rank has some rows of one expert; return the rows of all experts."""
    with setup.open(group) as comm:
        ids = torch.full((setup.max_tokens, setup.num_topk), -1, device=setup.device)
        ids.view(-1)[: rows[comm.rank]] = 2 * comm.rank
        return comm.plan_batch(ids, Balance(1)).rows_per_expert.tolist()


def check_balanced_dispatches(group: dist.ProcessGroup, setup: Setup, nums_skewed: Sequence[int]) -> list[Any]:
    """Dispatch with a plan of each batch, compute and combine; return the exchanges and the copies of each batch.

    All tokens are even over the experts, but for some that name expert 0 alone. Experts multiply rows by their number
    plus one; values are whole, so all sums are exact.
    """
    balance, found = Balance(2), []
    with setup.open(group) as comm:
        num_ranks, placement, num_experts = comm.topology.world_size, comm.placement, setup.num_experts
        per_node = comm.topology.ranks_per_node if comm.topology.num_nodes > 1 else None
        for num_skewed in nums_skewed:
            ids = torch.arange(setup.max_tokens * setup.num_topk).view(setup.max_tokens, -1) % num_experts
            ids[:num_skewed] = -1
            ids[:num_skewed, 0] = 0
            rows = num_ranks * ids[ids >= 0].bincount(minlength=num_experts).numpy()
            expected = plan_batch(rows, placement.expert_to_rank, num_ranks, balance, per_node)
            x = (torch.arange(4.0 * setup.max_tokens).view(-1, 4) + comm.rank).requires_grad_()
            number = int(comm.profile.operation.rpartition("#")[2] or 0)
            sent = comm.dispatch(x, ids, balance=balance)
            plan = sent.batch_plan
            for name in ("experts", "ranks", "rows", "loads"):
                assert getattr(plan, name).tolist() == getattr(expected, name).tolist(), name
            assert int(sent.num_rows_per_expert.sum()) == plan.loads[comm.rank]
            home = [expert for expert in placement.rank_to_experts[comm.rank] if expert >= 0]
            owned = [*home, *plan.experts[plan.ranks == comm.rank]]
            owned += [-1] * (len(sent.num_rows_per_expert) - len(owned))
            factors = torch.tensor(owned).repeat_interleave(sent.num_rows_per_expert).add(1.0)
            out = comm.combine(sent.rows * factors[:, None], sent.handle)
            of_tokens = (ids + 1.0).sum(1, keepdim=True)
            assert torch.equal(out, x * of_tokens)
            out.sum().backward()
            assert torch.equal(x.grad, of_tokens.expand(-1, 4))
            found.append((sent.handle.number - number, len(plan.experts) > 0))
    return found


def dispatch_without_balance(group: dist.ProcessGroup, setup: Setup, mistaken_rank: int) -> list[str]:
    """Return the errors of dispatches that one rank alone calls without a plan of the batch; then all plan."""
    errors = []
    with setup.open(group) as comm:
        x, ids = torch.ones(setup.max_tokens, 4), torch.zeros(setup.max_tokens, setup.num_topk, dtype=torch.int64)
        for others in (Balance(1), Balance(3)):
            balance = None if comm.rank == mistaken_rank else others
            errors.append(attempt(lambda balance=balance: comm.dispatch(x, ids, balance=balance)).text)
        assert comm.dispatch(x, ids, balance=Balance(1)).batch_plan.experts.tolist() == [0]
    return errors


def check_prefetch(group: dist.ProcessGroup, setup: Setup, seed: int) -> list[torch.Tensor]:
    """Prefetch for a random batch; compare copies with their homes, gradients with sums; return the gradients."""
    with setup.open(group) as comm:
        rank, num_ranks, placement = comm.rank, comm.topology.world_size, comm.placement
        random = np.random.default_rng(seed)
        rows = (100 * random.pareto(1.2, placement.num_experts)).astype(int)
        plan = plan_batch(rows, placement.expert_to_rank, num_ranks, Balance(2, tolerance=0))
        assert len(plan.ranks) or num_ranks == 1

        def of_expert(number: int) -> list[torch.Tensor]:
            kinds = ((torch.float32, (5, 3)), (torch.bfloat16, (7,)))
            weights = [values((1, *shape), dtype, seed, "expert", number)[0] for dtype, shape in kinds]
            return [*weights, any_bits((1, 3), torch.int16, seed, number)[0]]

        def stacked(experts: Sequence[int]) -> list[torch.Tensor]:
            return [torch.stack(each).to(setup.device) for each in zip(*map(of_expert, experts), strict=True)]

        weights = stacked(placement.rank_to_experts[rank])
        weights[:2] = [each.requires_grad_() for each in weights[:2]]
        spares = comm.prefetch_experts(weights, plan, 2)
        mine = plan.experts[plan.ranks == rank].tolist()
        expected = [torch.zeros(2, *each.shape[1:], dtype=each.dtype) for each in weights]
        for place, number in enumerate(mine):
            for each, of in zip(expected, of_expert(number), strict=True):
                each[place] = of
        assert_same([each.detach() for each in spares], expected, "copies")
        assert [each.requires_grad for each in spares] == [True, True, False]

        grads = [
            [values((2, *each.shape[1:]), each.dtype, seed, "grad", r) for r in range(num_ranks)]
            for each in weights[:2]
        ]
        torch.autograd.backward(list(spares[:2]), [of[rank].to(setup.device) for of in grads])
        for weight, of in zip(weights[:2], grads, strict=True):
            sums = torch.zeros(weight.shape)
            for src in range(num_ranks):
                for place, number in enumerate(plan.experts[plan.ranks == src].tolist()):
                    if placement.expert_to_rank[number] == rank:
                        sums[placement.expert_to_local[number]] += of[src][place].float()
            assert_same_bits(weight.grad.cpu(), sums.to(weight.dtype), "gradients")
        with torch.no_grad():
            assert not any(each.requires_grad for each in comm.prefetch_experts(weights, plan, 3))
        check_that_it_works(comm, setup)
        return [weight.grad.cpu() for weight in weights[:2]]


# One rank's mistakes. Each gets a valid (comm, weights, old, new) of four ranks with two places.

Call = Callable[[fusco.Communicator, list[torch.Tensor], Places, Places], Any]


def good(comm, weights, old, new):
    comm.move_experts(weights, old, new)


def other_old(comm, weights, old, new):
    comm.move_experts(weights, old[:, ::-1], new)


def other_new(comm, weights, old, new):
    comm.move_experts(weights, old, np.where(new == 3, 2, new))


def other_dtype(comm, weights, old, new):
    comm.move_experts([each.double() for each in weights], old, new)


def other_shape(comm, weights, old, new):
    comm.move_experts([each[:, :2].contiguous() for each in weights], old, new)


def other_steps(comm, weights, old, new):
    comm.start_moving_experts(weights, old, new, pace=fusco.Pace(step_bytes=1 << 20))


def other_verb(comm, weights, old, new):
    comm.shuffle({}, {})


def too_few_places(comm, weights, old, new):
    comm.move_experts([each[:1] for each in weights], old, new)


def lost_expert(comm, weights, old, new):
    comm.move_experts(weights, old, np.where(new == 3, 9, new))


def too_few_ranks(comm, weights, old, new):
    comm.move_experts(weights, old[:3], new[:3])


def flat_placement(comm, weights, old, new):
    comm.move_experts(weights, old.ravel(), new)


def one_tensor(comm, weights, old, new):
    comm.move_experts(weights[0], old, new)


def on_another_device(comm, weights, old, new):
    comm.move_experts([each.to("meta") for each in weights], old, new)


def transposed(comm, weights, old, new):
    comm.move_experts([torch.zeros(2, 4, 3, device=weights[0].device).transpose(1, 2)], old, new)


def without_weights(comm, weights, old, new):
    comm.move_experts(None, old, new, targets=weights)


def other_targets(comm, weights, old, new):
    comm.move_experts(weights, old, new, targets=[each.half() for each in weights])


def make_mistakes(group: dist.ProcessGroup, setup: Setup, mistaken_rank: int, mistakes: list[Call]) -> list[Outcome]:
    """One rank makes mistakes: no place changes, and after each all collectives work."""
    outcomes, old = [], np.array([[0, -1], [1, -1], [2, -1], [3, -1]])
    new = np.array([[0, 3], [1, 0], [2, 3], [3, 1]])
    with setup.open(group) as comm:
        for mistake in mistakes:
            weights = [torch.full((2, 3, 4), float(comm.rank), device=setup.device)]
            call = mistake if comm.rank == mistaken_rank else good
            outcomes.append(attempt(partial(call, comm, weights, old, new)))
            assert (weights[0] == comm.rank).all()
            check_that_it_works(comm, setup)
            good(comm, weights, old, new)
            assert weights[0][:, 0, 0].tolist() == new[comm.rank].tolist()
    return outcomes
