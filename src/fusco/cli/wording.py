"""Numbers as titles have them."""

from __future__ import annotations


def ratio(value: float) -> str:
    """Return a ratio with as many digits as matter.

    >>> ratio(2.134), ratio(1.0104), ratio(12.34)
    ('2.1', '1.01', '12')
    """
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}" if value < 1.2 else f"{value:.1f}"


def percent(share: float) -> str:
    """Return a share as percent.

    >>> percent(0.541), percent(0.004), percent(0.0)
    ('54 %', '0.4 %', '0 %')
    """
    return f"{share * 100:.1f} %" if 0 < share < 0.01 else f"{share:.0%}".replace("%", " %")


def duration(microseconds: float) -> str:
    """Return a time with three digits.

    >>> duration(0.5), duration(123.4), duration(12_345), duration(2.5e6)
    ('0.5 us', '123 us', '12.3 ms', '2.5 s')
    """
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:.3g} {unit}"
    return f"{microseconds:.3g} us"


def amount(num_bytes: float) -> str:
    """Return bytes with three digits.

    >>> amount(999), amount(26_840_000), amount(7.2e9)
    ('999 B', '26.8 MB', '7.2 GB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.3g} B"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> plural(1, "node"), plural(1250, "node")
    ('1 node', '1,250 nodes')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
