"""Policies: ways to use the rails of a host, and their limits. Their rules are in ``engine/schedule.c``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from fusco.core.integers import MAX_INT32, check_integer


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


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of the scheduler and of the transport, equal for all channels of an endpoint.

    Attributes:
        chunk_bytes: bytes of a chunk, the unit that is scheduled; 512 KiB as in NCCL and FuseLink.
        direct_first: chunks outstanding on a direct rail up to which it is preferred to idle rails. Two keep a rail
            busy; more would only wait there while idle rails could take them.
        direct_depth: chunks outstanding on a direct rail at most, for each channel. More than ``direct_first``, since
            with all other rails busy a late acknowledgement must not leave the rail idle.
        borrowed_per_rail: borrowed chunks outstanding on a rail at most: of all workers of the host together, or of
            each worker under ``fuselink-paper``.
        batch: chunks that are scheduled with the same knowledge of which rails are idle (FuseLink, section 4.4).
        refresh_s: age up to which that knowledge is used, however few chunks were scheduled.
        hold_s: time after its owner's last activity for which a rail counts as busy while a message is under way.
        release_s: the same when none is. Activity pauses within a message as long as a chunk takes; so with
            ``hold_s`` as short as that, borrowers come and go all the time.
        stall_s: time without an acknowledgement by the peer's kernel after which a rail counts as failed.
        no_rail_s: time without any rail to a peer after which its channel fails.

    Raises:
        TypeError, ValueError: for a value of another type, or out of range.
    """

    chunk_bytes: int = 512 * 1024
    direct_first: int = 2
    direct_depth: int = 4
    borrowed_per_rail: int = 2
    batch: int = 8
    refresh_s: float = 0.001
    hold_s: float = 0.010
    release_s: float = 0.002
    stall_s: float = 0.3
    no_rail_s: float = 3.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not name.endswith("_s"):
                check_integer(name, value, least=1, most=MAX_INT32)
            elif not isinstance(value, (int, float)) or isinstance(value, bool):
                raise TypeError(f"{name} must be a number, got {value!r}")
            elif not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.direct_depth < self.direct_first:
            raise ValueError(
                f"direct_depth must be at least direct_first, got {self.direct_depth}, {self.direct_first}"
            )
