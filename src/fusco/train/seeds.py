"""Seeds made of several numbers."""

from __future__ import annotations

_FACTOR = 1_000_003
_NUM_SEEDS = 2**63  # PyTorch's generators take no more than 64 bits, with a sign


def mix_seed(*numbers: int) -> int:
    """Return a seed for a generator from numbers of any size; it is unique for up to three below a million.

    >>> mix_seed(0, 2, 1)
    2000007
    >>> mix_seed(2**31, 2, 1) < 2**63
    True
    """
    mixed = 0
    for number in numbers:
        mixed = mixed * _FACTOR + number
    return mixed % _NUM_SEEDS
