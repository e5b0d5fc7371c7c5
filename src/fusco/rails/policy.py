"""Policies: ways to use the rails of a host. Their rules are in ``engine/schedule.c``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal


@dataclass(frozen=True)
class Policy:
    """A way to use the rails of a host.

    Attributes:
        name: its name for users.
        rule: ``"fuselink"`` takes the direct rail first, then idle ones; ``"direct"`` others only while no direct one
            works; ``"spray"`` all alike.
        bound: ``Limits.borrowed_per_rail`` bounds the chunks of all workers of the host, those of each, or none.
        monitor: how an owner's traffic is noticed: by its last activity, or by new completions between two polls.
        defers: whether borrowed traffic asks for a lower network priority.
        heeds_receiver: whether rails that are busy at the receiver are left alone.
        refreshes: whether knowledge is renewed after ``Limits.refresh_s``, or after ``Limits.batch`` chunks only.
    """

    name: str
    rule: Literal["fuselink", "spray", "direct"] = "fuselink"
    bound: Literal["rail", "worker", "none"] = "rail"
    monitor: Literal["activity", "completion"] = "activity"
    defers: bool = False
    heeds_receiver: bool = True
    refreshes: bool = True

    def to_text(self) -> str:
        """Return it as the engine reads it."""
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self)[1:])


#: The policies by name. ``direct`` uses other rails only while no direct one works. ``spray`` uses all rails alike.
#: ``fuselink-paper`` is FuseLink as published. ``fuselink`` bounds the borrowed chunks on a rail for all workers
#: together, gives them a lower network priority, and notices an owner's first chunk instead of its completion.
POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("fuselink", defers=True),
        Policy("fuselink-paper", bound="worker", monitor="completion", refreshes=False),
        Policy("spray", "spray", bound="none"),
        Policy("direct", "direct"),
    )
}


def policy_named(name: str) -> Policy:
    """Return a policy; ``ValueError`` for a name that is none."""
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name]
