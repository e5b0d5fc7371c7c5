"""Prompts of the Azure trace on ranks, in order of arrival, as a prefill batch has them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

import numpy as np

from fusco.bench.names import Prefill

_TRACE = "azure_llm_2023_conv.npz"
_NUM_PROMPTS = 4096
_TOKENS_OF_TRACE = 8192  # a rank with this many tokens has prompts of the lengths of the trace


def prompts_of_ranks(prefill: Prefill, max_tokens: int, num_ranks: int, first: int = 0) -> list[tuple[int, ...]]:
    """Return the lengths of the prompts of each rank; of several batches, if ranks are more than a job's.

    ``"one-prompt"`` for each rank, or ``"ragged"``: as many as fit on it. Lengths are those of the trace, from prompt
    ``first`` on and repeated, times ``max_tokens / 8192``, rounded up; longer prompts are cut.

    >>> prompts_of_ranks("one-prompt", 8192, 3), prompts_of_ranks("ragged", 300, 1)
    ([(374,), (396,), (879,)], [(14, 15, 33, 4, 4, 14, 49, 15, 9, 8, 15, 15, 49)])
    """
    with resources.as_file(resources.files("fusco.data") / _TRACE) as path, np.load(path) as trace:
        scaled = -(-trace["context_tokens"].astype(np.int64) * max_tokens // _TOKENS_OF_TRACE)
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
