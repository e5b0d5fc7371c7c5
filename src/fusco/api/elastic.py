"""Verbs that change the members of a communicator: ``shrink``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fusco.api.create import CommunicatorConfig, Kept, create_next
from fusco.api.membership import Membership, release
from fusco.api.uncompiled import uncompiled
from fusco.control.agreement import Agreement, Member, notify_excluded
from fusco.control.fingerprint import CollectiveFingerprint
from fusco.control.member_board import View
from fusco.control.member_gather import MemberGather, NewerViewError
from fusco.control.threads import in_thread
from fusco.core.errors import ClosedError, ExcludedError, PeerFailureError, Stall, name_ranks
from fusco.core.integers import check_integer


class Elastic(Membership):
    """The verbs of a ``Communicator`` that change its members."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part, ascending; all of the group until ``shrink``."""
        return tuple(self._validator.number_to_rank)

    @property
    def lost_experts(self) -> tuple[int, ...]:
        """The experts that no rank has, ascending: only ranks that are absent had them."""
        return self.placement.lost_experts

    @property
    def num_lost_rows(self) -> int:
        """Pairs of a token and a lost expert in this rank's dispatches so far, which got nothing.

        On CUDA the host waits for the device.
        """
        return self._num_lost_before + self._owners.num_lost_rows

    @uncompiled
    def shrink(
        self, leaving: Sequence[int] = (), *, min_ranks: int = 1, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """Go on without ranks that have failed or that leave: a collective of the ranks that are left.

        Call it after a ``PeerFailureError``, on every rank that gets one. Ranks agree who is left, through their status
        servers, and connect anew; this communicator goes on with the same rank numbers. Absent ranks have no tokens and
        no experts. What fails meanwhile is left out as well. A rank that does not call within the limit is left out,
        and its calls raise ``ExcludedError``.

        Experts that only absent ranks had are lost (``lost_experts``): their rows go nowhere, as if the id was -1,
        until ``place`` gives them another owner. Handles of earlier dispatches are invalid, tensors stay. On CUDA,
        delete graphs before, and capture them again.

        Args:
            leaving: ranks that leave on purpose, the same on all ranks; all ranks call, these included, whose
                communicator is closed then.
            min_ranks: raise if fewer are left. With more than half of the ranks, parts of a divided network do not both
                go on.
            timeout_s: the limit of each wait; ``None`` means that of the settings.

        Returns:
            The ranks that were members before and are absent now, ascending.

        Raises:
            ExcludedError: on a rank that others have left out; it can only close the communicator.
            PeerFailureError: if fewer than ``min_ranks`` are left. It can be called again.
            SharedMemoryError, MismatchError: as ``Communicator``, on all ranks.
            ClosedError: after ``close``.
        """
        with self._session.access.using("shrink"):
            config, limit_s = self._require_elastic("shrink"), self._limit_of(timeout_s)
            check_integer("min_ranks", min_ranks, least=1)
            leavers = self._checked_leavers(leaving)
            if leavers and self._have_agreed_to_leave(leavers):
                self._end()
                return leavers
            return self._go_on(config, set(leavers), min_ranks, limit_s)

    def _require_elastic(self, verb: str) -> CommunicatorConfig:
        if self._is_closed:
            raise ClosedError(f"{verb} was called on a communicator that is closed")
        self._validator.require_not_capturing(verb)
        if self._config is None:
            raise ValueError(f"{verb} needs a communicator that was made by its constructor")
        return self._config

    def _limit_of(self, timeout_s: float | None) -> float:
        assert self._config is not None
        if timeout_s is None:
            return self._config.settings.timeout_s
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        return timeout_s

    def _checked_leavers(self, leaving: Sequence[int]) -> tuple[int, ...]:
        leavers = tuple(sorted(set(leaving)))
        if outside := [rank for rank in leavers if rank not in self.ranks]:
            raise ValueError(f"leaving names rank {outside[0]}, but there are {name_ranks(self.ranks)}")
        if set(leavers) == set(self.ranks):
            raise ValueError("all ranks would leave; close the communicator instead")
        return leavers

    def _have_agreed_to_leave(self, leavers: tuple[int, ...]) -> bool:
        """Agree with all ranks who leaves, if none has failed; return whether this rank does."""
        if not self._session.broken:
            try:
                self._agree(CollectiveFingerprint("shrink", {"leaving": str(leavers)}))
                self._drain()
            except ExcludedError:
                raise
            except PeerFailureError:
                pass  # the ranks that are left agree without those that have failed, too
        return self.rank in leavers

    def _go_on(self, config: CommunicatorConfig, leavers: set[int], min_ranks: int, limit_s: float) -> tuple[int, ...]:
        """Agree on the members of the next generation, connect, and replace this rank's parts."""
        session = self._session
        before = dict(session.connections.members)
        suspects, gone = self._suspects()
        if not session.broken and not leavers:
            session.abandon("calls shrink")
        release(session, self._engine, holds_status_server=True)
        session.end("its members were to change, and that failed; call shrink again, or close it")
        ranks = set(before) - gone - leavers
        self._begin_generation(config, before, ranks, suspects, bool(leavers), min_ranks, limit_s)
        return tuple(sorted(set(before) - set(self.ranks)))

    def _suspects(self) -> tuple[set[int], set[int]]:
        """Return the ranks that a failure has named, and those that have left, by number."""
        server, numbers = self._session.connections.status_server, self.topology.numbers
        report = server.failure_report
        named = {numbers[rank] for rank in report.peers} if report else set()
        return named - {self.rank}, {numbers[rank] for rank in server.departures}

    def _begin_generation(
        self,
        config: CommunicatorConfig,
        members: Mapping[int, Member],
        ranks: Iterable[int],
        suspects: Iterable[int],
        is_planned: bool,  # noqa: FBT001
        min_ranks: int,
        limit_s: float,
    ) -> None:
        server = self._session.connections.status_server
        kept = Kept(placement=self._owners.placement_of_all, access=self._session.access)
        num_lost, left = self.num_lost_rows, set(ranks)
        with Agreement(server, self.rank, members, limit_s) as agreement:
            left -= agreement.silent(left & set(suspects))
            while True:
                view = agreement.agree(left, is_planned=is_planned)
                _require_enough(self.rank, view, min_ranks)
                gather = MemberGather(server, agreement, view, self.rank, members, self._validator.num_ranks, limit_s)
                try:
                    parts = create_next(gather, config, kept)
                    break
                except ExcludedError:
                    raise
                except (PeerFailureError, NewerViewError) as error:
                    peers = error.peers if isinstance(error, PeerFailureError) else ()
                    left = set(view.members) - agreement.silent(set(peers) - {self.rank})
                    is_planned = False
        self._finalizer.detach()
        self._join(parts)
        self._num_lost_before = num_lost
        if view.members[0] == self.rank:
            outside = {rank: each.address for rank, each in members.items() if rank not in view.members}
            in_thread(lambda: notify_excluded(server, view, self.rank, outside), "notices to ranks that are left out")


def _require_enough(rank: int, view: View, min_ranks: int) -> None:
    if len(view.members) >= min_ranks:
        return
    stall = Stall("agreeing on the members", view.members, f"{min_ranks} ranks", f"{len(view.members)}")
    reason = f"only {name_ranks(view.members)} are left"
    raise PeerFailureError(rank=rank, peers=(), operation="shrink", stall=stall, reason=reason, has_left=True)
