"""What a rank knows of the members of its communicator, and what others tell it while they agree on the next ones.

A *generation* is a set of members; ``shrink`` and ``grow`` begin the next. A *view* is the set that a rank proposes for
it. Requests of other ranks are answered in the thread of the status server; one other thread reads what they have left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fusco.core.errors import ExcludedError, Stall


@dataclass(frozen=True)
class View:
    """Members that a rank proposes. Of two views the one with the higher number is newer; agreed, it is a generation.

    ``is_planned`` if no rank has failed, and all are about to propose the same.
    """

    number: int
    members: tuple[int, ...]
    is_planned: bool = False


@dataclass(frozen=True)
class Exclusion:
    """The members of a generation that does not have this rank, as one of them, ``told_by``, has said."""

    members: tuple[int, ...]
    told_by: int

    @property
    def reason(self) -> str:
        """The cause, for an error."""
        return (
            f"rank {self.told_by} says that this rank is left out: rank(s) {', '.join(map(str, self.members))} go on "
            f"without it"
        )


class MemberBoard:
    """Views and values of other members; attributes are set by the thread that agrees.

    Attributes:
        rank: this rank.
        installed: the generation of this rank.
        proposed: the view that it proposes now, ``None`` while it is in no agreement.
        views: the latest view of each other rank.
        exclusion: set once another rank has said that this one is left out.
    """

    def __init__(self) -> None:
        self.rank = -1
        self.installed = View(0, ())
        self.proposed: View | None = None
        self.views: dict[int, View] = {}
        self.exclusion: Exclusion | None = None
        self._values: dict[tuple[int, str], dict[int, Any]] = {}
        self._since: dict[int, int] = {}  # the generation that the process of each member began with, at least

    def install(self, view: View, rank: int) -> None:
        """Begin a generation; values of earlier ones are dropped, and views of ranks that it does not have."""
        before = self.installed
        self._since = {
            member: self._since.get(member, 0) if member in before.members else before.number for member in view.members
        }
        self.rank, self.installed, self.proposed = rank, view, None
        for absent in self.views.keys() - view.members:
            del self.views[absent]
        for key in [key for key in self._values if key[0] < view.number]:
            del self._values[key]

    def values(self, number: int, stage: str) -> dict[int, Any]:
        """Return the values of a stage of a generation that have come, by rank."""
        return self._values.setdefault((number, stage), {})

    def next_number(self, ranks: Sequence[int]) -> int:
        """Return the number of this rank's next view: higher than its own so far, and as high as any of ``ranks``."""
        own = max(self.installed.number, self.proposed.number if self.proposed else 0)
        return max([own + 1, *(self.views[rank].number for rank in ranks if rank in self.views)])

    def note_view(self, message: dict[str, Any]) -> dict[str, Any]:
        """Note a view of another rank; the answer says whether that rank is left out here."""
        sender, base = int(message["sender"]), int(message["base"])
        if self._leaves_out(sender, base):
            members = (self.proposed or self.installed).members
            return {"excluded": {"members": list(members), "told_by": self.rank}}
        view = View(int(message["number"]), tuple(map(int, message["members"])), bool(message["is_planned"]))
        if sender not in self.views or self.views[sender].number < view.number:
            self.views[sender] = view
        return {}

    def note_value(self, message: dict[str, Any]) -> None:
        """Note a value of another rank in an all-gather."""
        if int(message["number"]) >= self.installed.number:
            self.values(int(message["number"]), str(message["stage"]))[int(message["sender"])] = message["value"]

    def note_exclusion(self, message: dict[str, Any]) -> dict[str, Any]:
        """Note that a later generation does not have this rank."""
        members = tuple(map(int, message["members"]))
        if int(message["number"]) > self.installed.number and self.rank not in members:
            self.exclusion = Exclusion(members, int(message["told_by"]))
        return {}

    def _leaves_out(self, sender: int, base: int) -> bool:
        """Return whether a rank whose generation is ``base`` has no part here any more."""
        if base < self._since.get(sender, 0):
            return True  # another process has its place by now
        if base < self.installed.number:
            return sender not in self.installed.members
        return self.proposed is not None and sender in self.installed.members and sender not in self.proposed.members


def excluded(rank: int, operation: str, exclusion: Exclusion) -> ExcludedError:
    """Return the error of a rank that others have left out."""
    stall = Stall("agreeing on the members", exclusion.members, "this rank in their view", "a view without it")
    return ExcludedError(
        rank=rank, peers=exclusion.members, operation=operation, stall=stall, reason=exclusion.reason, has_left=True
    )
