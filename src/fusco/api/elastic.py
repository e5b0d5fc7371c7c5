"""Verbs that change a communicator: its members by ``shrink``, ``grow`` and ``join``, its sizes by ``resize``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import Store

from fusco.api.create import CommunicatorConfig, Kept, placement_as_text, placement_of
from fusco.api.growth import Growing
from fusco.api.membership import release
from fusco.api.next_generation import Change, make_next, warm_up
from fusco.api.uncompiled import uncompiled
from fusco.control.agreement import Agreement, Member, notify_excluded
from fusco.control.fingerprint import CollectiveFingerprint
from fusco.control.joining import Invitation, Joining, JoinStore, invite, members_as_text, members_of
from fusco.control.member_gather import MemberGather
from fusco.core.config import Settings
from fusco.core.errors import ClosedError, ExcludedError, PeerFailureError, TransportError, name_ranks
from fusco.core.integers import check_integer
from fusco.core.placement import ExpertPlacement
from fusco.core.threads import in_thread

_Elastic = TypeVar("_Elastic", bound="Elastic")
_JOIN_LIMIT_S = 600.0  # of the wait of a new process for ``grow``


class Elastic(Growing):
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
        until ``place`` gives them another owner or ``grow`` brings their rank back. Handles of earlier dispatches are
        invalid, tensors stay. CUDA graphs go on within a node, in the memory that they were captured with.

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
            ValueError: between nodes, as long as a CUDA graph lives that has captured calls.
            ClosedError: after ``close``.
        """
        with self._session.access.using("shrink"):
            config, limit_s = self._require_elastic("shrink"), self._limit_of(timeout_s)
            check_integer("min_ranks", min_ranks, least=1)
            leavers = self._checked_leavers(leaving)
            if self.topology.num_nodes > 1:
                self._require_deleted_graphs("shrink")
            if leavers and self._have_agreed_to_leave(leavers):
                self._end()
                return leavers
            session, before = self._session, dict(self._session.connections.members)
            suspects, gone = self._suspects()
            if not session.broken and not leavers:
                session.abandon("calls shrink")
            absent = frozenset({*gone, *leavers})
            change = Change(
                operation="shrink",
                members=before,
                limit_s=limit_s,
                absent=absent,
                suspects=(suspects & before.keys()) - absent,
                is_planned=bool(leavers),
                min_ranks=min_ranks,
            )
            self._go_on(config, change)
            return tuple(sorted(set(before) - set(self.ranks)))

    @uncompiled
    def grow(
        self, store: Store | None = None, *, name: str = "communicator", timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """Take in processes that have called ``join``: a collective of the ranks that take part.

        It returns at once if none has. A process that joins gets the number of an absent rank, with the experts that
        the placement gives that rank: all of them before ``shrink``, or those of a later ``place``. It must have their
        weights before they compute rows. Handles of earlier dispatches are invalid, as after ``shrink``.

        Args:
            store: where processes ask to join; ``None`` means the process group's store. It is reached from the lowest
                rank only.
            name: of this communicator in the store, if a process joins several.
            timeout_s: the limit of each wait; ``None`` means that of the settings.

        Returns:
            The ranks that are members now and were absent before, ascending.

        Raises:
            TransportError: on all ranks, if the store cannot be reached. The communicator stays usable.
            ValueError: on all ranks, if a process asks to join and a CUDA graph lives that has captured calls.
            PeerFailureError: as in every collective, also if a process fails while it joins; then ``shrink`` goes on. A
                process whose arguments do not fit is left out instead.
        """
        with self._session.access.using("grow"):
            config, limit_s = self._require_elastic("grow"), self._limit_of(timeout_s)
            before = dict(self._session.connections.members)
            with self._session.collective("grow"):
                self._session.agree(CollectiveFingerprint("grow", {"name": name}))
                self._engine.synchronize()
                found = self._joiners(store or self._store, name, limit_s)
            if "error" in found:
                raise (ValueError if found["is_refused"] else TransportError)(found["error"])
            joiners = members_of(found["joiners"])
            if not joiners:
                return ()
            members = {**before, **joiners}
            comers = frozenset(joiners)
            change = Change(operation="grow", members=members, limit_s=limit_s, is_planned=True, joining=comers)
            self._go_on(config, change)
            return tuple(sorted(set(self.ranks) - set(before)))

    @uncompiled
    def resize(self, *, timeout_s: float | None = None, **changes: Any) -> None:
        """Change arguments of the communicator, such as ``max_tokens_per_rank``: a collective of the same ranks.

        Memory is made anew and the placement is the initial one if experts change; ranks that are absent stay so.
        Handles of earlier dispatches are invalid, as after ``shrink``.

        Args:
            timeout_s: the limit of each wait; ``None`` means that of the settings.
            changes: arguments of ``Communicator``, but ``group``, the same on all ranks.

        Raises:
            TypeError, ValueError: for this rank's bad arguments, or a CUDA graph that lives and has captured calls;
                RejectedInputError: for another rank's.
            MismatchError, SharedMemoryError: on all ranks, as ``Communicator``; then ``shrink`` goes on as before.
            PeerFailureError: as in every collective; then ``shrink`` goes on, too.
        """
        with self._session.access.using("resize"):
            config, limit_s = self._require_elastic("resize").with_fixed_sizes(), self._limit_of(timeout_s)
            with self.rejecting():
                self._require_deleted_graphs("resize")
                changed = replace(config, **changes)
                validator = changed.validator(self.rank, self._validator.num_ranks)
            self._agree(CollectiveFingerprint("resize", {name: str(value) for name, value in changes.items()}))
            self._settle_calls("resize")
            placement = validator.caller_placement if {"num_experts", "expert_placement"} & changes.keys() else None
            members = dict(self._session.connections.members)
            change = Change(operation="resize", members=members, limit_s=limit_s, is_planned=True)
            self._go_on(changed, change, placement)

    @classmethod
    def join(
        cls: type[_Elastic],
        store: Store,
        *,
        rank: int | None = None,
        name: str = "communicator",
        join_timeout_s: float = _JOIN_LIMIT_S,
        **arguments: Any,
    ) -> _Elastic:
        """Make the communicator of a new process that joins others, in a call of ``grow`` of theirs.

        The process needs no process group. ``rank`` and ``ranks`` of the result say what it has become, ``placement``
        which experts it has.

        Args:
            store: the store that the others pass to ``grow``, by default that of their process group, such as
                ``torch.distributed.TCPStore(host, port, is_master=False)``.
            rank: the rank to be, if it is absent; else, and with ``None``, the lowest that is.
            name: as in ``grow``.
            join_timeout_s: limit of the wait for ``grow``.
            arguments: those of ``Communicator``, but ``group``, the same as on the other ranks. If those have grown,
                ``max_tokens_per_rank`` is that of their ``capacity``.

        Raises:
            TransportError: if the others have not called ``grow`` within the limit, or cannot be reached.
            ValueError: for invalid arguments, or if no rank is absent.
            MismatchError: if the arguments are not those of the others, which go on without this process.
            PeerFailureError: if the others fail meanwhile.
        """
        given = {key: value for key, value in arguments.items() if value is not None}
        config = CommunicatorConfig(**{"max_tokens_per_rank": None, **given})
        warm_up(config)  # before others wait for it
        limit_s = config.settings.timeout_s
        joining = Joining(JoinStore(store, name, limit_s), rank, join_timeout_s)
        server = None
        while server is None:
            invitation = joining.ask()
            config.validator(invitation.rank, invitation.num_ranks)
            server = joining.come(invitation)
        server.is_held = True
        kept = Kept(placement=placement_of(invitation.placement), access=None)
        members, own = joining.members, invitation.rank
        others = frozenset(members_of(invitation.members))
        change = Change(operation="join", members=members, limit_s=limit_s, is_planned=True, required=others)
        try:
            parts, _ = make_next(server, own, invitation.num_ranks, config, kept, change)
        except BaseException:
            server.is_held = False
            server.close()
            raise
        server.is_held = False
        self = cls.__new__(cls)
        self._join(replace(parts, store=store))
        return self

    def _joiners(self, store: Store | None, name: str, limit_s: float) -> dict[str, Any]:
        """Return the processes that join, as the lowest rank has found them, or its error."""
        session, members = self._session, dict(self._session.connections.members)
        server, found = session.connections.status_server, dict[str, Any]()
        if self.rank == self.ranks[0]:
            try:
                found = {"joiners": members_as_text(self._invited(store, name, limit_s))}
            except (TransportError, ValueError) as error:
                found = {"error": str(error), "is_refused": isinstance(error, ValueError)}
        view = server.board.installed
        with Agreement(server, self.rank, members, limit_s, "grow") as agreement:
            gather = MemberGather(server, agreement, view, self.rank, members, self._validator.num_ranks, limit_s)
            gathered: list[dict[str, Any]] = gather.all_gather(f"joiners {session.sequence_number}", found)
        return gathered[0]

    def _invited(self, store: Store | None, name: str, limit_s: float) -> dict[int, Member]:
        if store is None:
            raise TransportError("this rank knows no store; pass one to grow")
        joins, connections = JoinStore(store, name, limit_s / 2), self._session.connections
        if self._engine.num_live_graphs() and joins.within_limit(joins.num_new_requests):
            self._require_deleted_graphs("grow")
        num_ranks = self._validator.num_ranks
        free = [rank for rank in range(num_ranks) if rank not in self.ranks]

        def invitation_of(rank: int) -> Invitation:
            return Invitation(
                rank=rank,
                num_ranks=num_ranks,
                secret=connections.status_server.secret,
                generation=connections.status_server.board.installed.number,
                members=members_as_text(connections.members),
                placement=placement_as_text(self._owners.placement_of_all),
            )

        own = connections.members[self.rank]
        return joins.within_limit(lambda: invite(joins, free, invitation_of, own))

    def _require_elastic(self, verb: str) -> CommunicatorConfig:
        if self._is_closed:
            raise ClosedError(f"{verb} was called on a communicator that is closed")
        self._validator.require_not_capturing(verb)
        if self._config is None:
            raise ValueError(f"{verb} needs a communicator that was made by its constructor")
        return self._config

    def _require_deleted_graphs(self, verb: str) -> None:
        """Raise if CUDA graphs live that cannot go on."""
        sizes = (*self._earlier, self)
        if num_graphs := sum(each._engine.num_live_graphs(are_deleted=True) for each in sizes):  # noqa: SLF001
            raise ValueError(
                f"{verb} makes the memory and the connections anew that {num_graphs} CUDA graph(s) with calls of this "
                f"communicator use: delete them, call {verb} again, and capture these calls again"
            )

    def _limit_of(self, timeout_s: float | None) -> float:
        assert self._config is not None
        if timeout_s is None:
            return self._config.settings.timeout_s
        return Settings(timeout_s=timeout_s).timeout_s  # checks it

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
                self._settle_calls("shrink")
            except ExcludedError:
                raise
            except PeerFailureError:
                pass  # the ranks that are left agree without those that have failed, too
        return self.rank in leavers

    def _settle_calls(self, verb: str) -> None:
        """Wait for the devices of all ranks, so that no rank releases memory that another's still reads."""
        self._drain()
        if self._engine.is_asynchronous:
            self._agree(CollectiveFingerprint(f"{verb} (settled)"))

    def _suspects(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return the ranks that a failure has named, and those that have left, by number."""
        server = self._session.connections.status_server
        numbers = server.board.installed.members  # of the generation that has failed, which may be none of this object
        report = server.failure_report
        named = {*self._session.blamed, *(numbers[rank] for rank in (report.peers if report else ()))}
        return frozenset(named - {self.rank}), frozenset(numbers[rank] for rank in server.departures)

    def _go_on(self, config: CommunicatorConfig, change: Change, placement: ExpertPlacement | None = None) -> None:
        """Agree on the members of the next generation, connect, and replace this rank's parts; placement, too."""
        session, config = self._session, config.with_fixed_sizes()
        owners = [*self._owners.former, *(each._owners for each in (*self._earlier, self))]  # noqa: SLF001
        self._former_owners = [each for each in owners if each.are_captured]
        captured = [calls for each in (*self._earlier, self) for calls in each._engine.keep_captured()]  # noqa: SLF001
        for each in self._earlier:
            each._end()  # noqa: SLF001  their handles become invalid
        placement = placement or self._owners.placement_of_all
        kept = Kept(placement=placement, access=session.access, captured=captured)
        num_ranks, own, server = self._validator.num_ranks, self.rank, session.connections.status_server
        release(session, self._engine, holds_status_server=True)
        session.end("its members were to change, and that failed; call shrink again, or close it")
        try:
            parts, view = make_next(server, own, num_ranks, config, kept, change)
        except PeerFailureError as error:
            session.blamed = error.peers
            raise
        server.is_held = False
        self._finalizer.detach()
        num_lost = self.num_lost_rows  # now nothing runs on the device that a rank might not come to
        self._join(parts)
        self._num_lost_before = num_lost
        if view.members[0] == own:
            outside = {rank: each.address for rank, each in change.members.items() if rank not in view.members}
            in_thread(lambda: notify_excluded(server, view, own, outside), "notices to ranks that are left out")
