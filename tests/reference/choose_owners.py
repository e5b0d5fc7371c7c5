"""Twin of ``choose_owners`` and ``OwnerTables.divide_rows``: the physical expert of each pair of all ranks, slowly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_UNITS = 2**20


def choose_owners(
    world_topk_idx: Sequence[torch.Tensor],
    experts: Sequence[Sequence[int]],
    shares: Sequence[Sequence[float]] | None,
    rank_to_node: Sequence[int],
) -> list[torch.Tensor]:
    """Return physical experts (T, K) of every rank.

    Args:
        world_topk_idx: ids of every rank's tokens, int64 (T, K), -1 for none.
        experts: the expert in each place of each rank, -1 for none.
        shares: of each place, or ``None``.
        rank_to_node: the node of each rank.
    """
    num_places = len(experts[0])
    chosen = [ids.clone() for ids in world_topk_idx]
    for expert in sorted({expert for of_rank in experts for expert in of_rank} - {-1}):
        owners = [rank for rank, of_rank in enumerate(experts) if expert in of_rank]
        places = {rank: rank * num_places + list(experts[rank]).index(expert) for rank in owners}
        pairs = [(ids == expert).nonzero().tolist() for ids in world_topk_idx]
        if shares is None:
            orders = [_in_turn(len(of_rank), rank, owners, rank_to_node) for rank, of_rank in enumerate(pairs)]
        else:
            of_owners = [shares[rank][list(experts[rank]).index(expert)] for rank in owners]
            quotas = dict(zip(owners, _quotas(sum(map(len, pairs)), of_owners), strict=True))
            orders = _by_quota(list(map(len, pairs)), quotas, rank_to_node)
        for rank, of_rank in enumerate(pairs):
            for (token, k), owner in zip(of_rank, orders[rank], strict=True):
                chosen[rank][token, k] = places[owner]
    return chosen


def _in_turn(num_rows: int, rank: int, owners: list[int], rank_to_node: Sequence[int]) -> list[int]:
    same_node = [owner for owner in owners if rank_to_node[owner] == rank_to_node[rank]]
    near = [rank] if rank in owners else same_node or owners
    return [near[(i + rank) % len(near)] for i in range(num_rows)]


def _largest_remainder(exact: list[tuple[int, float]], total: int) -> list[int]:
    """Round parts, (whole, remainder) each, to integers with this sum."""
    order = sorted(range(len(exact)), key=lambda i: (-exact[i][1], i))
    rounded = [whole for whole, _ in exact]
    for i in order[: total - sum(rounded)]:
        rounded[i] += 1
    return rounded


def _quotas(num_rows: int, shares: list[float]) -> list[int]:
    total = math.fsum(shares)
    exact = [(share / total if total else 1.0 / len(shares)) * _UNITS for share in shares]
    units = _largest_remainder([(math.floor(each), each - math.floor(each)) for each in exact], _UNITS)
    return _largest_remainder([divmod(num_rows * each, _UNITS) for each in units], num_rows)


def _by_quota(num_rows: list[int], quotas: dict[int, int], rank_to_node: Sequence[int]) -> list[list[int]]:
    """Return the owner of each row of each rank: rows of a rank are in order of owner."""
    taken: list[dict[int, int]] = [dict.fromkeys(quotas, 0) for _ in num_rows]
    left_rows, left = list(num_rows), dict(quotas)

    def take(src: int, owner: int) -> None:
        number = min(left_rows[src], left[owner])
        taken[src][owner] += number
        left_rows[src] -= number
        left[owner] -= number

    ranks = range(len(num_rows))
    for owner in quotas:
        take(owner, owner)
    for src in ranks:
        for owner in (owner for owner in quotas if rank_to_node[owner] == rank_to_node[src]):
            take(src, owner)
    for src in ranks:
        for owner in quotas:
            take(src, owner)
    return [[owner for owner in sorted(quotas) for _ in range(taken[src][owner])] for src in ranks]
