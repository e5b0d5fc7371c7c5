"""A rank's membership in a communicator: its group, its open calls and its end."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

from fusco.api.create import CommunicatorParts, describe
from fusco.api.owners import Owners
from fusco.control.fingerprint import REJECTION, CollectiveFingerprint
from fusco.control.session import Session
from fusco.core.config import Settings
from fusco.core.errors import ClosedError, PeerFailureError, ThreadError, cleanup_after, first_line
from fusco.core.placement import ExpertPlacement
from fusco.core.profile import CallProfile, ProfileHook
from fusco.core.threads import leak, within
from fusco.core.timeline import NO_TIMELINE, HostTimeline, Timeline
from fusco.core.topology import Topology
from fusco.engine.base import Engine

_RELEASE_LIMIT_S = 2.0  # limit of the wait of a thread that drops a communicator, until its resources are released


class Rejecting:
    """Context that passes the text of an error inside to a function; one made from a generator takes microseconds."""

    __slots__ = ("_reject",)

    def __init__(self, reject: Callable[[str], object]) -> None:
        self._reject = reject

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            with cleanup_after(error, "the other ranks could not be notified"):
                self._reject(first_line(error))


class Membership:
    """The part of a ``Communicator`` that is not a verb."""

    _earlier: tuple[Membership, ...] = ()  # its earlier, smaller sizes, whose handles are still valid
    _along: tuple[Session, int] | None = None  # the latest call along their handles, and its number in the latest size

    _limits: tuple[ExitStack, float] | None = None  # of the innermost ``limit``
    _former_owners: Sequence[Owners] = ()  # see ``Owners.former``

    def _join(self, parts: CommunicatorParts) -> None:
        self._session, self._engine, self._validator = parts.session, parts.engine, parts.validator
        self._config, self._num_lost_before = parts.config, 0
        self._grows = parts.config is not None and parts.config.grows
        self._store = parts.store or getattr(self, "_store", None)
        self._group = parts.group
        self._is_closed, self._earlier, self._along = False, (), None
        self._hooks: list[ProfileHook] = getattr(self, "_hooks", [])
        self._session.hooks = self._hooks
        self._owners = Owners(parts.session, parts.engine, parts.validator, self._former_owners)
        num_experts, device = parts.validator.num_experts, parts.validator.device
        name = f"a communicator of rank {self.rank} (num_experts={num_experts}, device {device})"
        # It does not refer to this object, which it would keep alive.
        self._finalizer = weakref.finalize(self, _release_dropped, self._session, self._engine, name)

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ", broken" if self.is_broken else ""
        return f"Communicator({describe(self._validator, self.topology)}{state})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a communicator cannot be copied or pickled, as it is a rank's connections and memory; make another one, "
            "on all ranks"
        )

    @property
    def rank(self) -> int:
        """Rank of this process in the group; it never changes."""
        return self._validator.number

    @property
    def topology(self) -> Topology:
        """The node of each rank; once ranks are absent, of those that are left, by ``topology.numbers``."""
        return self._engine.topology

    @property
    def placement(self) -> ExpertPlacement:
        """The ranks of each expert, as of the latest ``place``."""
        return self._owners.placement

    @property
    def is_broken(self) -> bool:
        """True once a failure has ended this rank's communicator, or it is closed: verbs raise ``ClosedError``."""
        return bool(self._session.broken)

    @property
    def profile(self) -> CallProfile:
        """Times and bytes of the latest collective on this rank; ``add_profile_hook`` has those of all."""
        if self._along and self._along[1] == self._session.sequence_number:
            return self._along[0].profile
        return self._session.profile

    def add_profile_hook(self, hook: Callable[[CallProfile], object]) -> Callable[[], None]:
        """Call ``hook(profile)`` on this rank after each collective that is complete; return what ends that.

        ``CallCounters`` is a hook that adds profiles up. A hook takes the time of the call, and should return within
        microseconds; one that raises is logged and called no more.
        """
        self._hooks.append(hook)
        return partial(_remove, self._hooks, hook)

    def wait(self) -> None:
        """Make the current CUDA stream wait for all calls launched so far; not a collective.

        ``Dispatched.wait`` and ``Launch.event`` wait for one call.
        """
        with self._session.access.using("wait"):
            for each in (*self._earlier, self):
                each._engine.wait()  # noqa: SLF001  of this class

    def synchronize(self) -> None:
        """Wait on the host until all calls launched so far are done; not a collective.

        Raises ``PeerFailureError`` if that takes longer than ``settings.timeout_s`` or a rank fails meanwhile,
        ``ClosedError`` if the communicator is broken or closed, since its latest results may be garbage then, and
        ``RowOverflowError`` if an earlier dispatch needed more than its static rows.
        """
        with self._session.access.using("synchronize"):
            self._validator.require_not_capturing("synchronize")
            for each in (*self._earlier, self):
                each._drain()  # noqa: SLF001  of this class
                if error := each._engine.pending_error():  # noqa: SLF001
                    raise error

    def check(self) -> None:
        """Raise what has gone wrong so far; for loops that replay CUDA graphs. Waits for nothing; not a collective.

        It takes a few microseconds: it reads words that the device has written to host memory, and examines the other
        ranks at most every 20 ms. Call it after a step's results have arrived on the host and before they are used. In
        a replay that a rank has missed, rows and sums are filled with bytes of 255 (NaN, or -1 in signed integers) on
        the ranks that waited for it, never with values of an earlier replay; so they are in all later replays.

        Raises:
            PeerFailureError: if a rank has died, failed or left, or if a wait of the device has timed out. Then the
                communicator goes on with ``shrink``, or is closed.
            RowOverflowError, ValueError: as ``synchronize`` does, for an earlier dispatch into static rows.
            ClosedError: if the communicator is broken or closed.
        """
        with self._session.access.using("check"):
            for each in (*self._earlier, self):
                each._session.check()  # noqa: SLF001  of this class
                if error := each._engine.pending_error():  # noqa: SLF001
                    raise error

    @contextmanager
    def limit(self, timeout_s: float) -> Iterator[None]:
        """Give the calls inside a time limit of their own, on this rank: ``with comm.limit(2.0): comm.dispatch(...)``.

        For what should be found out sooner or later than ``Settings.timeout_s``, such as a step of serving whose ranks
        are known to be in step. On CUDA it limits the waits of the host; those of kernels keep the limit of the
        settings, but end with the host's. A call that fails here fails on all ranks.
        """
        limit_s, before = Settings(timeout_s=timeout_s).timeout_s, self._limits  # checks it
        with ExitStack() as limits:
            for each in (*self._earlier, self):
                limits.enter_context(each._session.limited(limit_s))  # noqa: SLF001  of this class
            self._limits = limits, limit_s
            try:
                yield
            finally:
                self._limits = before

    def hand_over(self) -> None:
        """Let another thread own the communicator: the next one that calls a verb."""
        self._session.access.hand_over()

    def take_turns(self) -> None:
        """Let all threads call verbs from now on, one at a time.

        Threads that wait for each other, such as those of an engine's micro-batches, have an order of calls, which must
        be the same on all ranks. A call while another thread is inside one still raises ``ThreadError``.
        """
        self._session.access.take_turns()

    @contextmanager
    def record_timeline(self) -> Iterator[Timeline]:
        """Record the times at which calls made inside run; a collective.

        On CUDA these are the times of the device; on the CPU those of each call, its parts, and each slice that a task
        of it moves. The times of all ranks have about the same origin.
        """
        is_host = self._validator.device.type == "cpu"
        timeline = HostTimeline() if is_host else Timeline()
        self.synchronize()
        with self._session.access.using("record_timeline"), self._session.collective("record_timeline"):
            self._session.agree(CollectiveFingerprint("record_timeline"))
            timeline.begin()
        self._engine.record(timeline)
        self._session.timeline = timeline if isinstance(timeline, HostTimeline) else None
        try:
            yield timeline
        finally:
            self._engine.record(NO_TIMELINE)
            self._session.timeline = None

    def rejecting(self) -> Rejecting:
        """Turn an error inside into a rejection of the collective that all other ranks call: they raise at once.

        For adapters that look at arguments before they call a verb. On all other ranks the verb raises
        ``RejectedInputError``, and the communicator stays usable. Inside, no verb may be called.

            with comm.rejecting():
                rows = rows_of(layer_input)  # may raise
            comm.dispatch(rows, topk_idx)
        """
        return Rejecting(lambda reason: self._agree(CollectiveFingerprint(REJECTION, rejection=reason)))

    def agree(self, operation: str, counts: Sequence[int] = ()) -> Sequence[tuple[int, ...]]:
        """Check that all ranks are about to do the same operation, and return the counts that each of them gives.

        A collective that does nothing else, for adapters, before they do together what has no record, such as making
        another communicator. Raises ``MismatchError`` on all ranks if one calls something else, ``RejectedInputError``
        if one rejects its input.
        """
        return self._agree(CollectiveFingerprint(operation), counts)

    def _agree(self, fingerprint: CollectiveFingerprint, counts: Sequence[int] = ()) -> Sequence[tuple[int, ...]]:
        """Run a collective that does nothing but ``Session.agree``; return the counts of all ranks."""
        self._session.access.enter(fingerprint.operation)
        try:
            with self._session.collective(fingerprint.operation):
                return self._session.agree(fingerprint, counts)
        finally:
            self._session.access.leave()

    def close(self) -> None:
        """Wait until every rank closes, then release all resources; a second call does nothing.

        Raises ``PeerFailureError`` if a rank does not arrive within the limit. It does not wait for ranks that have
        died or left, and raises no error for them if this rank's calls are complete without them. Raises
        ``RowOverflowError`` as ``synchronize`` does.

        A signal handler may call it, or ``abort``, in the middle of a verb. It then waits for nothing: the verb, or
        the next one, raises ``ClosedError`` here and ``PeerFailureError`` on other ranks.
        """
        if self._is_closed or not self._session.access.is_own_process or self._has_interrupted("closed"):
            return
        pending: Exception | None = None
        with self._session.access.alone("close"):
            try:
                self._end_together()
                errors = (each._engine.pending_error() for each in (*self._earlier, self))  # noqa: SLF001  of this class
                pending = next(filter(None, errors), None)
            except ClosedError:
                pass  # it broke before, so there is no rank to wait for
            except BaseException as error:
                with cleanup_after(error, "the communicator's resources could not be released"):
                    self._leave(f"left its communicator, as close raised {type(error).__name__}")
                raise
            self._end()
        if pending:
            raise pending

    def abort(self) -> None:
        """Release all resources without waiting for other ranks; a second call does nothing.

        Prefer ``close`` if all ranks can call it: a rank that waits for this one, now or later, raises
        ``PeerFailureError``.
        """
        if self._is_closed or not self._session.access.is_own_process or self._has_interrupted("aborted"):
            return
        with self._session.access.alone("abort"):
            self._leave("left its communicator")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._session.access.is_own_process:
            return
        if error is not None:
            with cleanup_after(error, "the other ranks could not be notified"):
                self._session.abandon(f"left its communicator because of {type(error).__name__}: {error}")
        with cleanup_after(error, "the communicator could not be closed"):
            self.close()

    def _has_interrupted(self, what: str) -> bool:
        """Return True after ending the session, if a signal handler asks for it in the middle of a call.

        That call still uses the memory, so resources are released when it ends.
        """
        if not (operation := self._session.access.interrupted):
            return False
        self._is_closed = True
        self._session.access.at_end(self._end)
        self._session.interrupt(f"{what} its communicator in the middle of {operation}, in a signal handler")
        return True

    def _leave(self, reason: str) -> None:
        """Release all resources; ranks that wait for this one raise."""
        try:
            for each in (*self._earlier, self):
                each._session.depart(reason)  # noqa: SLF001  of this class
        finally:
            self._end()

    def _end(self) -> None:
        for each in self._earlier:
            each._end()  # noqa: SLF001  of this class
        self._is_closed = True
        if self._finalizer.detach():
            release(self._session, self._engine)

    def _end_together(self) -> None:
        """Wait until all ranks close and their devices have finished."""
        try:
            with self._session.collective("close"):
                self._session.agree(CollectiveFingerprint("close"))
                self._drain()
            for each in self._earlier:
                each._end_together()  # noqa: SLF001  of this class
            self._settle()
        except PeerFailureError as error:
            if not (error.has_left and self._engine.has_finished()):
                raise

    def _drain(self) -> None:
        with self._session.operation("synchronize"):
            self._engine.synchronize()

    def _settle(self) -> None:
        """Wait for the devices of all ranks, so that no rank releases memory that another still reads."""
        if self._engine.is_asynchronous:
            self._engine.stop_watching()  # a rank that gets through before this one disconnects
            with self._session.collective("settle"):
                self._session.agree(CollectiveFingerprint("settle"))
        self._engine.finish()


def _remove(hooks: list[ProfileHook], hook: ProfileHook) -> None:
    if hook in hooks:
        hooks.remove(hook)


def release(session: Session, engine: Engine[Any], *, holds_status_server: bool = False) -> None:
    """Release all resources without waiting for other ranks; the engine first, as it uses the session's memory.

    The status server stays if the next members go on with it.
    """
    with ExitStack() as resources:
        resources.callback(partial(session.close, holds_status_server=holds_status_server))
        resources.callback(engine.close)
        session.end("it is closed")


def _release_dropped(session: Session, engine: Engine[Any], name: str) -> None:
    """Release the resources of a communicator that is dropped unclosed, or is unclosed when the process ends."""
    if not session.access.is_own_process:
        leak((session, engine))  # its sockets and threads are the parent's
        return

    def leave() -> None:
        try:
            session.depart("left: its communicator was dropped without being closed")
        finally:
            try:
                with session.access.alone("the release"):
                    release(session, engine)
            except ThreadError:  # the process ends while a daemon thread is in a call, which still uses the memory
                leak((session, engine))

    # In a thread, as the garbage collector may have interrupted this one anywhere, with any lock held.
    has_left = within(_RELEASE_LIMIT_S, leave, f"the release of {name}")
    rest = "" if has_left else f", and has not released its resources within {_RELEASE_LIMIT_S} s"
    warnings.warn(f"{name} was dropped without being closed{rest}", ResourceWarning, stacklevel=2)
