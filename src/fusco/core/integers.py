"""Validation of integers that a caller passes."""

from __future__ import annotations

MAX_INT32 = 2**31 - 1


def check_integer(name: str, value: object, *, least: int, most: int | None = None) -> None:
    """Raise ``TypeError`` unless ``value`` is an integer, ``ValueError`` unless it is in range, with name and value.

    >>> check_integer("num_rows", 0, least=1)
    Traceback (most recent call last):
    ValueError: num_rows must be positive, got 0
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be {'positive' if least == 1 else f'at least {least}'}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")
