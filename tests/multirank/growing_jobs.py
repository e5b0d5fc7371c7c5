"""Functions on ranks: communicators that grow with their dispatches."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusco
from comparison import assert_same_bits

HIDDEN, NUM_EXPERTS, NUM_TOPK = 16, 8, 3
FEW, MANY, MORE = 20, 300, 700  # tokens: there is room for 256 at first
TIMEOUT_S = 30.0
SOON_S = 10.0
LATE_S = 0.3


def open_growing(group: dist.ProcessGroup, ranks_per_node: int, **changes: Any) -> fusco.Communicator:
    """Make a communicator of any number of tokens."""
    arguments: dict[str, Any] = {
        "num_experts": NUM_EXPERTS,
        "num_topk": NUM_TOPK,
        "max_tokens_per_rank": None,
        "hidden": HIDDEN,
        "dtype": torch.float32,
        "ranks_per_node": ranks_per_node,
        "settings": fusco.Settings(timeout_s=TIMEOUT_S),
        **changes,
    }
    return fusco.Communicator(group, **arguments)


def inputs(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows, ids and weights of a rank's tokens."""
    made = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_tokens, NUM_EXPERTS, generator=made).argsort(1)[:, :NUM_TOPK]
    return torch.randn(num_tokens, HIDDEN, generator=made), ids, torch.rand(num_tokens, NUM_TOPK, generator=made)


def same_as_fixed(group: dist.ProcessGroup, ranks_per_node: int) -> list[int]:
    """Compare rows, sums and gradients with those of a communicator that was large enough; return room after calls."""
    rank, room = dist.get_rank(group), []
    fixed = open_growing(group, ranks_per_node, max_tokens_per_rank=2 * MORE)
    growing = open_growing(group, ranks_per_node)
    kept = []
    # Rank 0 alone has too many tokens, then rank 1, then none.
    for step, sizes in enumerate([(FEW, FEW), (MANY, FEW), (FEW, MORE), (0, MANY), (MANY, MANY)]):
        x, ids, weights = inputs(sizes[rank % 2], 10 * step + rank)
        results = []
        for comm in (fixed, growing):
            leaf, of_rows = x.clone().requires_grad_(), weights.clone().requires_grad_()
            sent = comm.dispatch(leaf, ids, of_rows)
            results.append((leaf, of_rows, sent, comm.combine(sent.rows * 2, sent.handle)))
        (_, _, of_fixed, sums), (_, _, of_growing, grown_sums) = results
        assert_same_bits(of_growing.rows, of_fixed.rows, "rows")
        assert_same_bits(grown_sums, sums, "sums")
        kept.append((x, *results))
        room.append(growing.capacity.max_tokens_per_rank)
    # Backward passes and calls along handles of all sizes, in another order.
    for x, (leaf, of_rows, of_fixed, sums), (grown_leaf, grown_weights, of_growing, grown_sums) in reversed(kept):
        sums.square().sum().backward()
        grown_sums.square().sum().backward()
        assert_same_bits(grown_leaf.grad, leaf.grad, "gradients of rows")
        assert_same_bits(grown_weights.grad, of_rows.grad, "gradients of weights")
        again, grown_again = fixed.dispatch_again(x, of_fixed.handle), growing.dispatch_again(x, of_growing.handle)
        assert_same_bits(grown_again[0], again[0], "rows sent again")
        assert growing.profile.operation.startswith("dispatch_again #")
        both = [again[0], again[0] + 1]
        for grown_sum, sum_ in zip(
            growing.combine_all(both, of_growing.handle), fixed.combine_all(both, of_fixed.handle), strict=True
        ):
            assert_same_bits(grown_sum, sum_, "sums of several")
        values = again[0][:, 0].contiguous()
        assert_same_bits(
            growing.combine_weights(values, of_growing.handle), fixed.combine_weights(values, of_fixed.handle), "values"
        )
    growing.synchronize()
    growing.close()
    fixed.close()
    return room


def after_place(group: dist.ProcessGroup, ranks_per_node: int) -> None:
    """A placement that was replaced, and a planned batch, hold in the next size."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    placements = [
        fusco.ExpertPlacement.contiguous(NUM_EXPERTS, world_size).in_places(NUM_EXPERTS // world_size + 1),
        fusco.ExpertPlacement.explicit([(e + 1) % world_size for e in range(NUM_EXPERTS)], world_size),
    ]
    placements[1] = placements[1].in_places(NUM_EXPERTS // world_size + 1)
    sizes = {"expert_placement": placements[0]}
    fixed = open_growing(group, ranks_per_node, max_tokens_per_rank=MORE, **sizes)
    growing = open_growing(group, ranks_per_node, **sizes)
    x, ids, _ = inputs(MANY if rank else FEW, rank)
    for comm in (fixed, growing):
        comm.place(placements[1])
    assert_same_bits(growing.dispatch(x, ids).rows, fixed.dispatch(x, ids).rows, "rows after place")
    assert growing.placement.rank_to_experts == placements[1].rank_to_experts
    growing.close()
    fixed.close()


def _attempt(group: dist.ProcessGroup, *of_ranks: Any) -> str:
    begin = time.monotonic()
    with pytest.raises((ValueError, RuntimeError)) as raised:
        of_ranks[dist.get_rank(group)]()
    assert time.monotonic() - begin < SOON_S, raised.value
    return f"{type(raised.value).__name__}: {raised.value}"


def out_of_step(group: dist.ProcessGroup, ranks_per_node: int) -> list[str]:
    """Ranks call different things while one needs room, or is at an earlier handle; the next call works."""
    comm = open_growing(group, ranks_per_node)
    x, ids, weights = inputs(FEW, 0)
    many = inputs(MANY, 1)
    sent = comm.dispatch(x, ids, weights)
    texts = [_attempt(group, lambda: comm.dispatch(*many), lambda: comm.combine(sent.rows, sent.handle))]
    comm.dispatch(*many)
    texts.append(_attempt(group, lambda: comm.dispatch(x, ids, weights), lambda: comm.combine(sent.rows, sent.handle)))
    texts.append(
        _attempt(group, lambda: comm.combine(sent.rows[1:], sent.handle), lambda: comm.combine(sent.rows, sent.handle))
    )
    assert comm.combine(sent.rows, sent.handle).shape == x.shape
    wide = torch.zeros(MORE, HIDDEN + 1)
    texts.append(_attempt(group, lambda: comm.dispatch(x, ids), lambda: comm.dispatch(wide, *inputs(MORE, 2)[1:2])))
    comm.dispatch(x, ids)
    if dist.get_rank(group) == 1:
        time.sleep(LATE_S)
    for call in (partial(comm.dispatch, *inputs(2 * MORE, 3)), partial(comm.combine, sent.rows, sent.handle)):
        call(timeout_s=TIMEOUT_S)  # also of the size that is made meanwhile, and of earlier ones
    if dist.get_rank(group) == 1:
        comm.abort()
        return texts
    texts.append(_attempt(group, lambda: comm.combine(sent.rows, sent.handle)))
    comm.close()
    return texts


def shrink_when_grown(group: dist.ProcessGroup) -> str:
    """The last rank leaves after the communicator has grown: the sizes are fixed from then on."""
    comm = open_growing(group, 1)
    x, ids, _ = inputs(MANY, 0)
    comm.dispatch(x, ids)
    last = dist.get_world_size(group) - 1
    comm.shrink([last])
    if dist.get_rank(group) == last:
        return ""
    kept = comm.dispatch(x, ids)
    assert comm.combine(kept.rows, kept.handle).shape == x.shape
    many = inputs(MORE, 0)
    with pytest.raises(ValueError, match="max_tokens_per_rank=512") as raised:
        comm.dispatch(*many)
    comm.resize(max_tokens_per_rank=MORE)
    comm.dispatch(*many)
    comm.close()
    return str(raised.value)


def counted(group: dist.ProcessGroup, ranks_per_node: int) -> tuple[dict[str, int], int]:
    """Hooks see all calls of all sizes, one that raises is called once; return calls by verb, and bytes."""
    comm, counters, seen = open_growing(group, ranks_per_node), fusco.CallCounters(), []

    def broken(profile: fusco.CallProfile) -> None:
        seen.append(profile.operation)
        raise RuntimeError("of a dashboard")

    comm.add_profile_hook(counters)
    comm.add_profile_hook(broken)
    sent = [comm.dispatch(*inputs(num_tokens, num_tokens)) for num_tokens in (FEW, MANY)]
    for each in sent:
        comm.combine(each.rows, each.handle)
    remove = comm.add_profile_hook(broken)
    remove()
    remove()
    comm.close()
    assert len(seen) == 1
    totals = counters.by_verb
    assert all(totals[verb].seconds > 0 for verb in ("dispatch", "combine"))
    kind = "internode_row" if ranks_per_node == 1 else "intranode_row"
    return {verb: totals[verb].calls for verb in ("dispatch", "combine")}, totals["dispatch"].bytes[kind]
