"""Measure variants in turn, and the slowest rank's median."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import TypeVar

_Variant = TypeVar("_Variant")
_Measured = TypeVar("_Measured")


def measure_in_turn(
    variants: Mapping[str, _Variant],
    measure: Callable[[_Variant], _Measured],
    advance: Callable[[], None],
    *,
    num_warm_ups: int,
    num_iterations: int,
) -> dict[str, list[_Measured]]:
    """Measure all variants in every iteration, and return the measurements of each, without those of warm-ups.

    ``advance`` is called after every iteration.

    >>> times = iter([9, 8, 1, 2])
    >>> measure_in_turn({"a": 0, "b": 0}, lambda _: next(times), print, num_warm_ups=1, num_iterations=1)
    <BLANKLINE>
    <BLANKLINE>
    {'a': [1], 'b': [2]}
    """
    found: dict[str, list[_Measured]] = {name: [] for name in variants}
    for _ in range(num_warm_ups + num_iterations):
        for name, variant in variants.items():
            found[name].append(measure(variant))
        advance()
    return {name: measured[num_warm_ups:] for name, measured in found.items()}


def made(name: str, make: Callable[[], _Variant], *, is_peer: bool) -> _Variant | None:
    """Return what ``make`` does; ``None``, with a warning, for a variant of another library that cannot be set up."""
    try:
        return make()
    except Exception as error:  # another library may raise anything
        if not is_peer:
            raise
        warnings.warn(f"{name} could not be set up, and is left out: {error!r}", stacklevel=2)
        return None


def slowest_median(per_rank: Iterable[Sequence[float]], digits: int = 3) -> float:
    """Return the median over iterations of the slowest rank's value, rounded.

    >>> slowest_median([[1.0, 5.0, 2.0], [3.0, 1.0, 1.0]])
    3.0
    """
    slowest: list[float] = [max(of_iteration) for of_iteration in zip(*per_rank, strict=True)]
    return round(median(slowest), digits)
