"""Choice of a rail for the next chunk: pure functions of what a sender knows (FuseLink, section 4.3.2).

The direct rail comes first, then rails that are idle on both hosts, up to a bound of borrowed chunks on each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from fusco.rails.limits import Limits

WAIT = -1  # no rail may take a chunk now


@dataclass(slots=True)
class View:
    """State of a channel's rails when a chunk is scheduled. Sets of rails are bit masks: bit i is rail i."""

    direct: int  # rails that the sender owns
    usable: int  # rails with a connection to the peer
    idle: int  # rails idle on both hosts; indirect rails outside it are busy
    outstanding: list[int]  # for each rail, chunks of this channel that the peer has not acknowledged
    borrowed: list[int]  # for each rail, borrowed chunks outstanding that count towards the bound


@dataclass(frozen=True)
class Policy:
    """A way to use the rails of a host.

    Attributes:
        name: its name for users.
        choose: the choice of a rail.
        bound: ``Limits.borrowed_per_rail`` bounds the chunks of all workers of the host, those of each, or none.
        monitor: how an owner's traffic is noticed: by its last activity, or by new completions between two polls.
        defers: whether borrowed traffic asks for a lower network priority.
        heeds_receiver: whether rails that are busy at the receiver are left alone.
        monitored: whether it looks at idle rails at all.
        refreshes: whether knowledge is renewed after ``Limits.refresh_s``, or after ``Limits.batch`` chunks only.
    """

    name: str
    choose: Callable[[View, Limits], int] = field(repr=False)
    bound: Literal["rail", "worker", "none"] = "rail"
    monitor: Literal["activity", "completion"] = "activity"
    defers: bool = False
    heeds_receiver: bool = True
    monitored: bool = True
    refreshes: bool = True


@lru_cache(maxsize=4096)
def rails_of(mask: int) -> tuple[int, ...]:
    """Return the rails of a mask, ascending.

    >>> rails_of(0b1010)
    (1, 3)
    """
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)


def _least(load: list[int], rails: int, bound: int) -> int:
    """Return the rail with the least load, if that is below the bound; ``WAIT`` otherwise. The lowest of equals."""
    best = WAIT
    for rail in rails_of(rails):
        if load[rail] < bound:
            best, bound = rail, load[rail]
    return best


def _without_direct(view: View, limits: Limits) -> int:
    """Choose among the others when no direct rail works; busy ones are better than none."""
    indirect = view.usable & ~view.direct
    rail = _least(view.borrowed, indirect & view.idle, limits.borrowed_per_rail)
    return _least(view.borrowed, indirect, limits.borrowed_per_rail) if rail == WAIT else rail


def _choose_direct(view: View, limits: Limits) -> int:
    direct = view.direct & view.usable
    return _least(view.outstanding, direct, limits.direct_depth) if direct else _without_direct(view, limits)


def _choose_any(view: View, limits: Limits) -> int:
    return _least(view.outstanding, view.usable, limits.direct_depth)


def _choose_fuselink(view: View, limits: Limits) -> int:
    """Rail 0 is direct and has two chunks outstanding, rail 1 is idle, the owner of rail 2 uses it.

    >>> view = View(direct=0b001, usable=0b111, idle=0b010, outstanding=[2, 0, 0], borrowed=[0, 0, 0])
    >>> _choose_fuselink(view, Limits()), _choose_direct(view, Limits())
    (1, 0)
    >>> _choose_fuselink(View(0b001, 0b111, 0b010, [4, 0, 0], [0, 2, 0]), Limits()) == WAIT
    True
    """
    direct = view.direct & view.usable
    if not direct:
        return _without_direct(view, limits)
    rail = _least(view.outstanding, direct, limits.direct_first)
    if rail == WAIT:
        rail = _least(view.borrowed, view.idle & view.usable & ~direct, limits.borrowed_per_rail)
    return _least(view.outstanding, direct, limits.direct_depth) if rail == WAIT else rail


#: The policies by name. ``direct`` uses other rails only while no direct one works. ``spray`` uses all rails alike.
#: ``fuselink-paper`` is FuseLink as published. ``fuselink`` bounds the borrowed chunks on a rail for all workers
#: together, gives them a lower network priority, and notices an owner's first chunk instead of its completion.
POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("fuselink", _choose_fuselink, defers=True),
        Policy("fuselink-paper", _choose_fuselink, bound="worker", monitor="completion", refreshes=False),
        Policy("spray", _choose_any, bound="none", monitored=False),
        Policy("direct", _choose_direct, monitored=False),
    )
}


def policy_named(name: str) -> Policy:
    """Return a policy; ``ValueError`` for a name that is none."""
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name]
