"""The parts of a communicator whose members change: agree who takes part, connect, and begin again if one fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusco.api.create import CommunicatorConfig, CommunicatorParts, Kept, create_next
from fusco.control.agreement import JOINING, Agreement, Member
from fusco.control.member_board import View
from fusco.control.member_gather import MemberGather
from fusco.control.node_memory import warm_up_node_memory
from fusco.control.record_round import warm_up_record_round
from fusco.control.status_server import StatusServer
from fusco.core.errors import ExcludedError, FuscoError, PeerFailureError, Stall, name_ranks
from fusco.cpu.kernels.warm_up import warm_up_cpu


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of members.

    Attributes:
        operation: the verb, for errors.
        members: all that may take part, by number.
        absent: of these, those that this rank does not propose.
        suspects: of these, those that a failure has named; without an answer they are left out at once.
        limit_s: the limit of each wait.
        is_planned: whether all propose the same, as no rank has failed.
        min_ranks: raise if fewer are left.
        joining: of ``members``, those that join; if their arguments do not fit, all are left out.
        required: raise if none of these is left.
    """

    operation: str
    members: Mapping[int, Member]
    limit_s: float
    absent: frozenset[int] = frozenset()
    suspects: frozenset[int] = frozenset()
    is_planned: bool = False
    min_ranks: int = 1
    joining: frozenset[int] = frozenset()
    required: frozenset[int] = frozenset()


def make_next(
    server: StatusServer, rank: int, num_ranks: int, config: CommunicatorConfig, kept: Kept, change: Change
) -> tuple[CommunicatorParts, View]:
    """Return the parts of the next generation, and its members.

    Raises ``ExcludedError`` if this rank is left out, ``PeerFailureError`` if too few are left, or if one fails while
    others join, and what all members raise while they connect.
    """
    left, is_planned = set(change.members) - change.absent, change.is_planned
    with Agreement(server, rank, change.members, change.limit_s, change.operation) as agreement:
        if change.operation not in JOINING:  # there all raise, and name who has died
            left -= agreement.silent(change.suspects)
        while True:
            view = agreement.agree(left, is_planned=is_planned)
            _require_enough(rank, view, change)
            gather = MemberGather(server, agreement, view, rank, change.members, num_ranks, change.limit_s)
            try:
                return create_next(gather, config, kept), view
            except ExcludedError:
                raise
            except PeerFailureError as error:
                if change.operation in JOINING:
                    raise
                left, is_planned = set(view.members) - agreement.silent(set(error.peers) - {rank}), False
            except FuscoError:
                if not change.joining.intersection(view.members):
                    raise
                left = set(view.members) - change.joining  # on all members: what joins does not fit to what is here


def warm_up(config: CommunicatorConfig) -> None:
    """Compile what connecting and the engine need, so that no rank waits for it."""
    warm_up_node_memory()
    warm_up_record_round()
    if str(config.device) == "cpu":
        warm_up_cpu()


def _require_enough(rank: int, view: View, change: Change) -> None:
    if len(view.members) >= change.min_ranks and (not change.required or change.required.intersection(view.members)):
        return
    stall = Stall("agreeing on the members", view.members, f"{change.min_ranks} ranks", f"{len(view.members)}")
    reason = f"only {name_ranks(view.members)} are left"
    raise PeerFailureError(rank=rank, peers=(), operation=change.operation, stall=stall, reason=reason, has_left=True)
