"""Batches of a prefill: the lengths of each rank's prompts, which follow each other without padding."""

from __future__ import annotations

from fusco.bench.prompts import prompts_of_ranks

_SKEW = 8


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


def describe(batch: str, lengths: list[tuple[int, ...]]) -> str:
    """Describe a batch for a table.

    >>> describe("2", [(4, 4), (4, 4)]), describe("skewed", [(16,), (2,)]), describe("ragged", [(3, 4), (5,)])
    ('2 x 4', 'skewed: 16, 2', 'ragged: 2 of 7, 1 of 5')
    """
    if batch.isdecimal():
        return f"{batch} x {lengths[0][0]}"
    if batch == "skewed":
        return "skewed: " + ", ".join(str(sum(rank)) for rank in lengths)
    return "ragged: " + ", ".join(f"{len(rank)} of {sum(rank)}" for rank in lengths)
