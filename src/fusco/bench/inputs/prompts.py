"""Prompts of ranks in a prefill: those of the Azure trace in order of arrival, or of given lengths, without padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusco.bench.inputs.arrays import PROMPTS, load_shipped
from fusco.bench.names import Prefill

_NUM_PROMPTS = 4096
_SKEW = 8
_TOKENS_OF_TRACE = 8192  # a rank with this many tokens has prompts of the lengths of the trace


def prompts_of_ranks(prefill: Prefill, max_tokens: int, num_ranks: int, first: int = 0) -> list[tuple[int, ...]]:
    """Return the lengths of the prompts of each rank; of several batches, if ranks are more than a job's.

    ``"one-prompt"`` for each rank, or ``"ragged"``: as many as fit on it. Lengths are those of the trace, from prompt
    ``first`` on and repeated, times ``max_tokens / 8192``, rounded up; longer prompts are cut.

    >>> prompts_of_ranks("one-prompt", 8192, 3), prompts_of_ranks("ragged", 300, 1)
    ([(374,), (396,), (879,)], [(14, 15, 33, 4, 4, 14, 49, 15, 9, 8, 15, 15, 49)])
    """
    scaled = -(-load_shipped(PROMPTS)["context_tokens"].astype(np.int64) * max_tokens // _TOKENS_OF_TRACE)
    lengths, ranks = np.minimum(scaled, max_tokens).tolist(), []
    for _ in range(num_ranks):
        prompts = [lengths[first % len(lengths)]]
        first += 1
        while prefill == "ragged" and sum(prompts) + lengths[first % len(lengths)] <= max_tokens:
            prompts.append(lengths[first % len(lengths)])
            first += 1
        ranks.append(tuple(prompts))
    return ranks


@dataclass(frozen=True)
class Batch:
    """A prefill batch: for each rank its number of tokens, and where in a trace of routing they begin."""

    number: int
    num_tokens: tuple[int, ...]
    first_token: tuple[int, ...]


def draw_batches(prefill: Prefill, num_batches: int, max_tokens: int, num_ranks: int, seed: int) -> list[Batch]:
    """Return batches of prompts as they arrive, with tokens at random places of a trace; by seed alone.

    Seed 0 begins with the first prompt. Arguments are those of ``prompts_of_ranks``.

    >>> [sum(batch.num_tokens) for batch in draw_batches("ragged", 2, max_tokens=1024, num_ranks=2, seed=0)]
    [1550, 1937]
    """
    random = np.random.default_rng(seed)
    first = int(random.integers(_NUM_PROMPTS)) if seed else 0
    prompts = prompts_of_ranks(prefill, max_tokens, num_batches * num_ranks, first)
    return [
        Batch(
            number,
            tuple(map(sum, prompts[number * num_ranks : (number + 1) * num_ranks])),
            tuple(random.integers(1 << 31, size=num_ranks).tolist()),
        )
        for number in range(num_batches)
    ]


def prompt_lengths(batch: str, tokens: int, num_ranks: int) -> list[tuple[int, ...]]:
    """Return the lengths of every rank's prompts, of at most ``tokens`` on a rank.

    ``batch`` is a number of equal prompts on each rank; or ``"skewed"``, one prompt on each rank, an eighth as long on
    all ranks but the first; or ``"ragged"``, see ``prompts_of_ranks``. Raises ``ValueError`` for another name, and for
    prompts that do not divide ``tokens``.

    >>> prompt_lengths("2", 8, 2), prompt_lengths("skewed", 16, 2)
    ([(4, 4), (4, 4)], [(16,), (2,)])
    """
    if batch == "skewed":
        return [(tokens if rank == 0 else max(1, tokens // _SKEW),) for rank in range(num_ranks)]
    if batch == "ragged":
        return prompts_of_ranks("ragged", tokens, num_ranks)
    if not batch.isdecimal() or not int(batch):
        raise ValueError(f"batch {batch!r} is neither a number of prompts nor 'ragged' nor 'skewed'")
    if tokens % int(batch):
        raise ValueError(f"{batch} equal prompts do not divide {tokens} tokens")
    return [(tokens // int(batch),) * int(batch)] * num_ranks


def describe_prompts(batch: str, lengths: list[tuple[int, ...]]) -> str:
    """Describe a batch for a table.

    >>> describe_prompts("2", [(4, 4), (4, 4)]), describe_prompts("ragged", [(3, 4), (5,)])
    ('2 x 4', 'ragged: 2 of 7, 1 of 5')
    >>> describe_prompts("skewed", [(16,), (2,)])
    'skewed: 16, 2'
    """
    if batch.isdecimal():
        return f"{batch} x {lengths[0][0]}"
    if batch == "skewed":
        return "skewed: " + ", ".join(str(sum(rank)) for rank in lengths)
    return "ragged: " + ", ".join(f"{len(rank)} of {sum(rank)}" for rank in lengths)
