"""The grid of routings, including edge cases. Any rank can rebuild every input of a test from (seed, rank)."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True)
class Case:
    """The routing of a whole group of ranks; ``kind`` is one of ``KINDS``."""

    kind: str
    seed: int
    world_size: int
    num_experts: int
    num_topk: int
    max_tokens: int

    @property
    def chosen_rank(self) -> int:
        """The rank that a kind treats differently from the others."""
        return self.seed % self.world_size

    def num_tokens(self, rank: int) -> int:
        """Tokens of a rank."""
        return _COUNTS[_KIND_TO_PARTS[self.kind][0]](self, rank)

    def topk_idx(self, rank: int) -> torch.Tensor:
        """Expert ids of a rank's tokens, int64 (num_tokens, num_topk)."""
        return _ROUTERS[_KIND_TO_PARTS[self.kind][1]](self, self.num_tokens(rank), random_of(self.seed, "ids", rank))

    def topk_weights(self, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Weights of both signs, about every seventh zero, (num_tokens, num_topk)."""
        shape = (self.num_tokens(rank), self.num_topk)
        random = random_of(self.seed, "weights", rank)
        weights = torch.rand(shape, generator=random, dtype=torch.float64) * 2 - 0.5
        return torch.where(torch.rand(shape, generator=random) < 0.15, 0.0, weights).to(dtype)

    @property
    def world_topk_idx(self) -> list[torch.Tensor]:
        """``topk_idx`` of every rank."""
        return [self.topk_idx(rank) for rank in range(self.world_size)]

    def world_topk_weights(self, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        """``topk_weights`` of every rank."""
        return [self.topk_weights(rank, dtype) for rank in range(self.world_size)]


def random_places(
    num_ranks: int, places_per_rank: int, num_experts: int, *, has_shares: bool, seed: int
) -> tuple[list[list[int]], list[list[float]] | None]:
    """Return experts in places, with replicas and empty places, and their shares or ``None``."""
    random = np.random.default_rng(seed)
    experts: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert in random.permutation(num_experts).tolist():
        free = [rank for rank in range(num_ranks) if len(experts[rank]) < places_per_rank]
        experts[int(random.choice(free))].append(expert)
    for of_rank in experts:
        others = [expert for expert in range(num_experts) if expert not in of_rank]
        while len(of_rank) < places_per_rank and random.random() < 0.9 and others:
            of_rank.append(others.pop(int(random.integers(len(others)))))
        of_rank.extend([-1] * (places_per_rank - len(of_rank)))
        random.shuffle(of_rank)
    if not has_shares:
        return experts, None
    # Some are zero, and an expert may have none at all.
    shares = [[float(max(0.0, random.normal(0.4, 0.5))) if e >= 0 else 0.0 for e in of_rank] for of_rank in experts]
    return experts, shares


def random_of(*what: int | str) -> torch.Generator:
    """Return a random generator seeded by a name: the same on every rank, and different for every name."""
    return torch.Generator().manual_seed(zlib.crc32(repr(what).encode()))


def number_of(low: int, high: int, *what: int | str) -> int:
    """Return a random integer from ``low`` to ``high``, both included."""
    return int(torch.randint(low, high + 1, (), generator=random_of(*what)))


def values(shape: tuple[int, ...], dtype: torch.dtype, *what: int | str) -> torch.Tensor:
    """Normally distributed values, for sums."""
    return torch.randn(shape, generator=random_of(*what), dtype=torch.float64).to(dtype)


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, *what: int | str) -> torch.Tensor:
    """Random bits, including NaNs of every kind, for rows that are only moved."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=random_of(*what)).bool()
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.randint(0, 256, (num_bytes,), generator=random_of(*what), dtype=torch.uint8)
    return memory.view(dtype).view(shape)


def _uniform_count(case: Case, rank: int) -> int:
    return case.max_tokens


def _ragged_count(case: Case, rank: int) -> int:
    return number_of(0, case.max_tokens, case.seed, "count", rank)


def _no_count(case: Case, rank: int) -> int:
    return 0


def _count_but_on_one(case: Case, rank: int) -> int:
    return 0 if rank == case.chosen_rank else max(1, _ragged_count(case, rank))


def _count_on_one_only(case: Case, rank: int) -> int:
    return case.max_tokens if rank == case.chosen_rank else 0


_COUNTS: dict[str, Callable[[Case, int], int]] = {
    "full": _uniform_count,
    "ragged": _ragged_count,
    "none": _no_count,
    "all but one": _count_but_on_one,
    "one only": _count_on_one_only,
}


def _distinct_ids(case: Case, num_tokens: int, random: torch.Generator) -> torch.Tensor:
    return _without_repeats(torch.rand(num_tokens, case.num_experts, generator=random), case.num_topk)


def _ids_with_holes(case: Case, num_tokens: int, random: torch.Generator) -> torch.Tensor:
    ids = _distinct_ids(case, num_tokens, random)
    return torch.where(torch.rand(ids.shape, generator=random) < 0.4, -1, ids)


def _no_ids(case: Case, num_tokens: int, random: torch.Generator) -> torch.Tensor:
    return torch.full((num_tokens, case.num_topk), -1)


def _ids_of_one_expert(case: Case, num_tokens: int, random: torch.Generator) -> torch.Tensor:
    ids = _no_ids(case, num_tokens, random)
    ids[:, case.seed % case.num_topk] = case.seed % case.num_experts
    return ids


def _skewed_ids(case: Case, num_tokens: int, random: torch.Generator) -> torch.Tensor:
    popularity = torch.arange(1, case.num_experts + 1).pow(-1.5).log()
    gumbel = -torch.rand(num_tokens, case.num_experts, generator=random).log().neg().log()
    return _without_repeats(popularity + gumbel, case.num_topk)


def _repeated_ids(case: Case, num_tokens: int, random: torch.Generator) -> torch.Tensor:
    few = torch.randint(0, case.num_experts, (2,), generator=random)
    return few[torch.randint(0, 2, (num_tokens, case.num_topk), generator=random)]


def _without_repeats(scores: torch.Tensor, num_topk: int) -> torch.Tensor:
    ids = scores.argsort(dim=1, descending=True)[:, :num_topk]
    return torch.nn.functional.pad(ids, (0, num_topk - ids.shape[1]), value=-1)


_ROUTERS: dict[str, Callable[[Case, int, torch.Generator], torch.Tensor]] = {
    "distinct": _distinct_ids,
    "holes": _ids_with_holes,
    "nowhere": _no_ids,
    "one expert": _ids_of_one_expert,
    "skewed": _skewed_ids,
    "repeated": _repeated_ids,
}

_KIND_TO_PARTS = {
    "balanced": ("full", "distinct"),
    "ragged": ("ragged", "distinct"),
    "ragged with holes": ("ragged", "holes"),
    "skewed": ("full", "skewed"),
    "ragged and skewed": ("ragged", "skewed"),
    "repeated experts": ("ragged", "repeated"),
    "one expert takes all": ("ragged", "one expert"),
    "a rank without tokens": ("all but one", "holes"),
    "one rank has all tokens": ("one only", "distinct"),
    "no experts": ("ragged", "nowhere"),
    "no tokens": ("none", "distinct"),
}
KINDS = tuple(_KIND_TO_PARTS)


def rows_to_quantize(num_rows: int, hidden: int, dtype: torch.dtype, *what: int | str) -> torch.Tensor:
    """Rows of very different sizes, with zeros of both signs, subnormal values, infinities and NaNs of both signs."""
    random = random_of("quantize", num_rows, hidden, str(dtype), *what)
    x = torch.randn(num_rows, hidden, generator=random)
    x *= torch.exp2(torch.randint(-30, 20, (num_rows, hidden // 16), generator=random)).repeat_interleave(16, dim=1)
    x = x.to(dtype)
    tiny = torch.finfo(dtype).smallest_normal
    specials = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), -float("nan"), tiny, tiny / 4, -tiny / 2]
    specials += [torch.finfo(dtype).max, torch.finfo(dtype).min, 448.0, -6.0, 1e-4]
    which = torch.randint(0, len(specials), x.shape, generator=random)
    chosen = torch.tensor(specials, dtype=torch.float64).to(dtype)[which]
    x = torch.where(torch.rand(x.shape, generator=random) < 0.003, chosen, x)
    if num_rows > 3:
        x[0], x[1], x[2], x[3] = 0.0, -0.0, tiny / 4, torch.finfo(dtype).max
    return x
