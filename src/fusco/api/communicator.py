"""The public verbs: dispatch, combine, shuffle, all_to_all, gather_send, scatter_recv, close."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist

from fusco.api.autograd import CombineRows, DispatchRows, ExchangeRows, Precomputed, Verbs
from fusco.api.collective import run_collective
from fusco.api.create import CommunicatorConfig, CommunicatorParts, create
from fusco.api.handle import Dispatched, Handle
from fusco.api.validation import DispatchOptions
from fusco.control.fingerprint import CollectiveFingerprint
from fusco.control.keeping import leak
from fusco.control.session import Session
from fusco.control.threads import within
from fusco.core.config import Launch, Settings, StaticRows
from fusco.core.errors import ClosedError, PeerFailureError, beside
from fusco.core.placement import ExpertPlacement
from fusco.core.profile import CallProfile
from fusco.core.rows import wants_grad
from fusco.core.segments import Segments
from fusco.core.timeline import NO_TIMELINE, Timeline
from fusco.core.topology import Topology
from fusco.engine.base import Engine
from fusco.planner.balancer import Balancer, balance_send_and_receive
from fusco.schedule.schedule import ScheduleMode

_GIVING_BACK_S = 2.0  # how long a thread that drops a communicator waits for it to be given back


class Communicator:
    """One rank's end of expert-parallel communication among the ranks of a process group.

    Making one is a collective, and so is every verb but ``gather_send`` and ``scatter_recv``: all ranks call the same
    ones in the same order. Gradients flow through ``dispatch``, ``combine`` and ``all_to_all``; whether an input
    requires them must be the same on all ranks, as the backward pass communicates too.

    Every collective that takes input raises ``TypeError`` or ``ValueError`` for this rank's bad input, and on all other
    ranks ``RejectedInputError``; ``MismatchError`` on all ranks where inputs do not go together; and
    ``PeerFailureError`` if a rank fails or does not come within ``settings.timeout_s``, after which the communicator
    can only be closed. Use it in a ``with`` block, or call ``close``. One that is dropped unclosed is given back, too,
    with a ``ResourceWarning``; the other ranks learn that this one has left.

    It belongs to one thread: the first that calls a verb, whichever made it. Another thread gets a ``ThreadError`` at
    once, unless that one has ended or has called ``hand_over``. A backward pass may call verbs in autograd's own
    threads; ``close``, ``abort`` and the end of a ``with`` block may come from any thread while no call is under way.
    In a process forked from the one that made it verbs raise ``ClosedError``, and its end does nothing.
    """

    def __init__(  # noqa: PLR0913  what a communicator is made for, all by name
        self,
        group: dist.ProcessGroup | None = None,
        *,
        num_experts: int,
        num_topk: int,
        max_tokens_per_rank: int,
        max_bytes_per_token: int,
        expert_placement: Sequence[int] | None = None,
        ranks_per_node: int | None = None,
        balancer: Balancer = balance_send_and_receive,
        settings: Settings | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        """Make the communicator, together with all other ranks of the group.

        Args:
            group: the process group, of any backend; ``None`` means the default one.
            num_experts: experts of all ranks together.
            num_topk: most experts of a token (top-k); on CUDA 32 at most.
            max_tokens_per_rank: most tokens that a rank dispatches in one call.
            max_bytes_per_token: most bytes of a token's row, in ``dispatch`` (all payloads together) and in ``combine``
                (in ``settings.wire_dtype``, where that is wider than the rows' dtype).
            expert_placement: the rank of each expert; ``None`` gives every rank an equal run of consecutive experts.
            ranks_per_node: how many consecutive ranks make a node; ``None`` finds out from the ranks' hosts.
            balancer: chooses who forwards for whom, a pure function of the traffic; the same one on all ranks. Between
                nodes every dispatch compares the groups that it gives, in another exchange between ranks, unless it is
                one of ``fusco.BALANCERS``; ``MismatchError`` if they differ.
            settings: slices, rings, limits; ``None`` means the defaults.
            device: ``"cpu"``, ``"cuda"`` (the current device, so call ``torch.cuda.set_device`` first) or ``"cuda:i"``.
                On CUDA each rank has a device of its own; ranks of a node reach each other over NVLink, nodes each
                other through NCCL.

        Raises:
            ValueError: for sizes, a placement, a topology or a device that do not fit together.
            MismatchError: if ranks give different values; RejectedInputError: if another rank's were refused.
            SharedMemoryError: if there is no room; see ``memory_size_hint``.
            PeerFailureError: if a rank does not come within ``settings.timeout_s``.

        """
        config = CommunicatorConfig(
            num_experts=num_experts,
            num_topk=num_topk,
            max_tokens_per_rank=max_tokens_per_rank,
            max_bytes_per_token=max_bytes_per_token,
            expert_placement=expert_placement,
            ranks_per_node=ranks_per_node,
            balancer=balancer,
            device=device,
            settings=settings or Settings(),
        )
        self._join(create(group, config))

    @classmethod
    def of_parts(cls, parts: CommunicatorParts) -> Communicator:
        """A communicator of parts that were made already, whether connected to other ranks or stand-ins."""
        communicator = cls.__new__(cls)
        communicator._join(parts)  # noqa: SLF001  of this class
        return communicator

    def _join(self, parts: CommunicatorParts) -> None:
        self._session, self._engine, self._validator = parts.session, parts.engine, parts.validator
        self._is_closed = False
        num_experts, device = parts.validator.placement.num_experts, parts.validator.device
        name = f"a communicator of rank {self.rank} (num_experts={num_experts}, device {device})"
        # Not through this object, which it must not keep alive.
        self._forgotten = weakref.finalize(self, _give_back, self._session, self._engine, name)

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self._validator.rank

    @property
    def topology(self) -> Topology:
        """Which ranks share a node."""
        return self._engine.topology

    @property
    def placement(self) -> ExpertPlacement:
        """Which rank owns which expert."""
        return self._validator.placement

    @property
    def profile(self) -> CallProfile:
        """Times and bytes of the latest collective on this rank."""
        return self._session.profile

    def dispatch(
        self,
        x: torch.Tensor | Sequence[torch.Tensor],
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        expert_alignment: int = 1,
        with_weights: bool = False,
        static: StaticRows | None = None,
        launch: Launch | None = None,
    ) -> Dispatched:
        """Send every token to the experts it is routed to; rows land expert-major on the ranks that own them.

        Args:
            x: rows (num_tokens, ...) of any dtype, at most 6 dimensions; or up to 8 payloads that share the routing,
                such as FP8 values and their scales, without gradients then.
            topk_idx: int32 or int64 (num_tokens, num_topk); -1 means no expert.
            topk_weights: float16, bfloat16, float32 or float64 (num_tokens, num_topk), the weights that ``combine``
                applies. They travel as float32, float64 as float64.
            expert_alignment: every expert's block is padded with zero rows to a multiple of this. Ranks may differ.
            with_weights: return the weight of every row, too.
            static: a fixed size for the output. ``None`` means exactly as large as needed, for which CUDA needs to
                wait, on the host, until the plan is made; with a fixed size it waits for nothing on the device, and
                the call can be captured in a CUDA graph (by all ranks, and replayed by all in the same order).
                Between nodes the host waits for the counts of rows in any case, and nothing can be captured. What is
                launched is in one order whichever streams it is called on, but a graph's replays are not in it: they,
                and calls on other streams beside them, must be put in order by the caller.
            launch: how to use the device; gradients take as many multiprocessors, on the caller's stream.

        Returns:
            Rows, counts, weights if asked for, and the handle.

        Raises:
            RowOverflowError: on a rank whose static output is too small: here on the CPU; on CUDA from
                ``synchronize``, ``close``, or the next collective, which is then called off on all ranks.
            OutputMemoryError: on a rank without memory for its rows, on the CPU; the communicator is broken then.

        """
        payloads = _as_list(x)
        options = DispatchOptions(
            expert_alignment=expert_alignment, with_weights=with_weights, static=static, launch=launch
        )
        output = run_collective(
            self._session,
            self._engine,
            "dispatch",
            lambda: self._validator.validate_dispatch(payloads, topk_idx, topk_weights, options),
            self._engine.prepare_dispatch,
        )
        handle, rows = Handle(output.plan, topk_weights, self._session.sequence_number), output.rows
        if with_weights and launch and launch.own_stream:
            self._engine.wait()  # weights are made on the caller's stream
        given_weights, verbs = topk_weights if with_weights else None, self._verbs(launch)
        weights, (first, *more) = self._in_graph(payloads, given_weights, rows, handle, verbs)
        return Dispatched(first, handle.plan.num_rows_per_expert, weights, handle, tuple(more))

    def dispatch_again(
        self, x: torch.Tensor | Sequence[torch.Tensor], handle: Handle, *, launch: Launch | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Send other rows along the routing of a handle, without planning again.

        Args:
            x: as in ``dispatch``, with as many tokens as the handle has.
            handle: from a ``dispatch`` of this communicator, of the same one on all ranks.
            launch: how to use the device; gradients take as many multiprocessors, on the caller's stream.

        Returns:
            The expert-major rows of each payload, as in ``dispatch``.

        """
        payloads = _as_list(x)
        rows = self._move_again(payloads, handle, launch)
        _, rows = self._in_graph(payloads, None, rows, handle, self._verbs(launch))
        return tuple(rows)

    def combine(self, y: torch.Tensor, handle: Handle, *, launch: Launch | None = None) -> torch.Tensor:
        """Bring expert-major rows home: ``out[t]`` is the sum over k of ``topk_weights[t, k] * y[row of (t, k)]``.

        Sums are accumulated in float32 (float64 for float64 rows). Between nodes, and on CUDA between ranks, partial
        sums travel in ``settings.wire_dtype``, by default the dtype of ``y``, so that each part of a 16-bit row is
        rounded once more.

        Args:
            y: float16, bfloat16, float32 or float64 (num_rows, hidden), laid out as the rows of ``dispatch``; padding
                rows are ignored.
            handle: from the ``dispatch``. With ``handle.unweighted()``, or if no weights were given, rows are added
                up as they are.
            launch: how to use the device; gradients take as many multiprocessors, on the caller's stream.

        Returns:
            Rows (num_tokens, hidden) of the dtype of ``y``; zero for tokens without experts.

        """
        out = self._sum(y, handle, launch)
        if wants_grad(y) or wants_grad(handle.topk_weights):
            out = CombineRows.apply(y, handle.topk_weights, Precomputed(out), handle, self._verbs(launch))  # type: ignore[no-untyped-call]
        return out

    def shuffle(self, send: Mapping[int, Segments], receive: Mapping[int, Segments]) -> None:
        """Exchange scattered segments of any sizes among all ranks, without any MoE.

        Args:
            send: what goes to each rank; ranks left out get nothing.
            receive: where what comes from each rank is written, as many bytes as that rank sends. Segments must overlap
                neither each other nor what is sent, which is not checked: what is written and sent then is undefined.

        """
        run_collective(
            self._session,
            self._engine,
            "shuffle",
            lambda: self._validator.validate_shuffle(send, receive),
            self._engine.prepare_shuffle,
        )

    def all_to_all(
        self,
        output: torch.Tensor | None,
        input: torch.Tensor,  # noqa: A002  the names are those of torch.distributed.all_to_all_single
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        schedule: ScheduleMode | None = None,
    ) -> torch.Tensor:
        """Exchange rows among all ranks, as ``torch.distributed.all_to_all_single``; skew between nodes is evened out.

        Ranks of a node first even out what they send to each other node, then nodes exchange in one-to-one stages, and
        what came to another rank of the node is handed on while the next stage is under way. Beside the rings, a call
        takes memory for what this rank carries for others of its node, at most about its share of what the node sends
        and receives; none where nodes have one rank, or with one node. Returns when the output is complete and the
        input may change; on CUDA both hold for what is launched afterwards. There is no ``async_op``, as the calling
        thread moves the rows itself: to overlap on CUDA, call it on a stream of its own; on the CPU, from a thread of
        its own, on a communicator that no other thread uses. The first call compiles the scheduler: seconds, once on
        each machine, or beforehand by ``fusco.schedule.warm_up``.

        With ``output=None`` the result is a new tensor through which gradients flow, of any order: the backward pass is
        an exchange the other way, by the same kind of schedule, in which all ranks take part.

        Args:
            output: contiguous rows (num_rows, ...) of any dtype, written here by source rank. It must not overlap
                ``input``, and no gradients flow through it. ``None`` makes a new one, of as many rows as
                ``output_split_sizes`` say, or as ``input`` has.
            input: rows of the same dtype and shape, by destination rank; copied first unless contiguous. Both have at
                most 6 dimensions.
            output_split_sizes: rows that come from each rank; ``None`` means equally many.
            input_split_sizes: rows that go to each rank; ``None`` means equally many.
            schedule: how stages between nodes are made (see ``fusco.schedule.make_schedule``), the same on all ranks;
                ``None`` chooses between ``"exact"`` and ``"few"`` by ``fusco.schedule.choose_mode``.

        Returns:
            ``output``, or the new one.

        Raises:
            TypeError, ValueError: for this rank's bad arguments; RejectedInputError: for another rank's.
            MismatchError: on all ranks, before anything is sent, if a rank expects other numbers of rows than are sent
                to it, or rows, schedule or whether the input requires gradients differ.
            PeerFailureError: as every collective; the output is undefined then.

        Source: FAST (Lei et al., NSDI 2026), section 4.3.

        """
        splits = (output_split_sizes, input_split_sizes)
        request = run_collective(
            self._session,
            self._engine,
            "all_to_all",
            lambda: self._validator.validate_all_to_all(output, input, splits, schedule),
            self._engine.prepare_all_to_all,
        )
        if output is not None or not wants_grad(input):
            return request.output

        def way_back(grad: torch.Tensor) -> torch.Tensor:
            return self.all_to_all(None, grad, request.send_rows, request.receive_rows, schedule=schedule)

        return cast("torch.Tensor", ExchangeRows.apply(input, Precomputed(request.output), way_back))  # type: ignore[no-untyped-call]

    def gather_send(self, segments: Segments, dst: int) -> None:
        """Read scattered segments, in order, and send them to rank ``dst``, which calls ``scatter_recv``.

        Returns when ``dst`` has everything. Raises ``ValueError`` for a rank that is no other rank of the group,
        ``MismatchError`` (there too) if it expects another number of bytes, ``PeerFailureError`` if it does not come.
        """
        with self._session.access.using("gather_send"):
            self._validator.validate_segments("gather_send", segments, dst)
            with self._session.point_to_point(f"gather_send to rank {dst}"):
                self._engine.gather_send(segments, dst)

    def scatter_recv(self, segments: Segments, src: int) -> None:
        """Receive from rank ``src``, which calls ``gather_send``, and write each segment to its own place.

        Raises as ``gather_send``.
        """
        with self._session.access.using("scatter_recv"):
            self._validator.validate_segments("scatter_recv", segments, src)
            with self._session.point_to_point(f"scatter_recv from rank {src}"):
                self._engine.scatter_recv(segments, src)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory that peers can read: rows that stand in it leave from there, without being copied first.

        A collective; ranks give the same dtype and the same shape, that of the rank that needs most. The memory lives
        until the communicator is closed. On the CPU it is plain memory, since there rows are copied in any case.

        Args:
            shape: of the tensor, at most 6 dimensions; for ``dispatch``, (num_tokens, ...). A slice of its first tokens
                is in place, too.
            dtype: of the tensor.

        Raises:
            SharedMemoryError: if there is not enough memory; on the other ranks ``RejectedInputError``.

        """
        return run_collective(
            self._session,
            self._engine,
            "empty",
            lambda: self._validator.validate_empty(shape, dtype),
            self._engine.prepare_empty,
        )

    def wait(self) -> None:
        """Have the current CUDA stream wait for everything that this communicator has launched; not a collective."""
        with self._session.access.using("wait"):
            self._engine.wait()

    def synchronize(self) -> None:
        """Wait until everything that this communicator has launched is done; not a collective.

        Raises ``PeerFailureError`` if that takes longer than ``settings.timeout_s`` or a rank fails meanwhile,
        ``ClosedError`` if the communicator cannot be used any more, since its latest results may be garbage then, and
        ``RowOverflowError`` if an earlier dispatch into static rows needed more of them.
        """
        with self._session.access.using("synchronize"):
            self._validator.require_not_capturing("synchronize")
            self._drain()
            if error := self._engine.pending_error():
                raise error

    def hand_over(self) -> None:
        """Let another thread use the communicator from now on: the next one that calls a verb."""
        self._session.access.hand_over()

    @contextmanager
    def record_timeline(self) -> Iterator[Timeline]:
        """Record when what is launched inside ran on the device; a collective, for CUDA only.

        All ranks' times have about the same origin. On the CPU, ``profile`` says where the time went.
        """
        if self._validator.device.type != "cuda":
            raise ValueError(f"timelines are recorded on CUDA; this communicator's device is {self._validator.device}")
        timeline = Timeline()
        self.synchronize()
        with self._session.access.using("record_timeline"), self._session.collective("record_timeline"):
            self._session.agree(CollectiveFingerprint("record_timeline"))
            timeline.begin()
        self._engine.record(timeline)
        try:
            yield timeline
        finally:
            self._engine.record(NO_TIMELINE)

    def close(self) -> None:
        """Wait until every rank closes, then give everything back; a second call does nothing.

        Raises ``PeerFailureError`` if a rank does not come within the limit. Ranks that have died or left are not
        waited for, and no error if all that was launched here is complete without them. Raises ``RowOverflowError`` as
        ``synchronize`` does.
        """
        if self._is_closed or not self._session.access.is_own_process:
            return
        pending: Exception | None = None
        with self._session.access.alone("close"):
            try:
                self._end_together()
                pending = self._engine.pending_error()
            except ClosedError:
                pass  # it broke before, so there is nobody to wait for
            except BaseException as error:
                with beside(error, "the communicator could not be given back"):
                    self._end()
                raise
            self._end()
        if pending:
            raise pending

    def abort(self) -> None:
        """Give everything back without waiting for anybody, as at the end of a process; a second call does nothing.

        Where all ranks can, ``close`` is better: a rank that still waits for this one, or does so later, raises
        ``PeerFailureError``.
        """
        if self._is_closed or not self._session.access.is_own_process:
            return
        with self._session.access.alone("abort"):
            try:
                self._session.depart("left its communicator")
            finally:
                self._end()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._session.access.is_own_process:
            return
        if error is not None:
            with beside(error, "the other ranks could not be told"):
                self._session.abandon(f"left its communicator because of {type(error).__name__}: {error}")
        with beside(error, "the communicator could not be closed"):
            self.close()

    def _end(self) -> None:
        self._is_closed = True
        self._forgotten.detach()
        _close(self._session, self._engine)

    def _end_together(self) -> None:
        """Wait until all ranks have come to the end, and their devices, too."""
        try:
            with self._session.collective("close"):
                self._session.agree(CollectiveFingerprint("close"))
                self._drain()
            self._settle()
        except PeerFailureError as error:
            if not (error.has_left and self._engine.has_finished()):
                raise

    def _drain(self) -> None:
        with self._session.operation("synchronize"):
            self._engine.synchronize()

    def _settle(self) -> None:
        """This rank's device is done: wait for all others, so that none takes away what another still needs."""
        if self._engine.is_asynchronous:
            with self._session.collective("settle"):
                self._session.agree(CollectiveFingerprint("settle"))
        self._engine.finish()

    def _move_again(
        self, payloads: Sequence[torch.Tensor], handle: Handle, launch: Launch | None
    ) -> list[torch.Tensor]:
        """``dispatch_again`` without gradients."""
        return run_collective(
            self._session,
            self._engine,
            "dispatch_again",
            lambda: self._validator.validate_redispatch(payloads, handle, launch),
            self._engine.prepare_redispatch,
        )

    def _sum(self, y: torch.Tensor, handle: Handle, launch: Launch | None) -> torch.Tensor:
        """``combine`` without gradients."""
        return run_collective(
            self._session,
            self._engine,
            "combine",
            lambda: self._validator.validate_combine(y, handle, launch),
            self._engine.prepare_combine,
        )

    def _in_graph(
        self,
        payloads: Sequence[torch.Tensor],
        topk_weights: torch.Tensor | None,
        rows: list[torch.Tensor],
        handle: Handle,
        verbs: Verbs,
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """The weights of rows, if ``topk_weights`` are given, and the rows."""
        if topk_weights is None and not wants_grad(payloads[0]):
            return None, rows
        first, weights = DispatchRows.apply(payloads[0], topk_weights, Precomputed(rows[0]), handle, verbs)  # type: ignore[no-untyped-call]
        return weights, [first, *rows[1:]]

    def _verbs(self, launch: Launch | None) -> Verbs:
        """What the gradients of a call move by: launched as the call itself was, on the stream of the graph."""
        mirrored = (launch or Launch()).on_callers_stream()
        return Verbs(
            lambda x, handle: self._move_again([x], handle, mirrored)[0],
            lambda y, handle: self._sum(y, handle, mirrored),
        )


def _close(session: Session, engine: Engine[Any]) -> None:
    """Give everything back, without waiting for anybody: the engine's connections go over the session's memory."""
    with ExitStack() as resources:
        resources.callback(session.close)
        resources.callback(engine.close)
        session.end("it is closed")


def _give_back(session: Session, engine: Engine[Any], name: str) -> None:
    """Give back what a communicator has that is dropped, or is there when the process ends; nobody closed it."""
    if not session.access.is_own_process:
        leak((session, engine))  # its sockets and threads are the parent's; gloo would wait for threads of its own
        return

    def leave() -> None:
        try:
            session.depart("left: its communicator was dropped without being closed")
        finally:
            _close(session, engine)

    # In a thread, as the garbage collector may have stopped this one anywhere, with any lock.
    within(_GIVING_BACK_S, leave)
    warnings.warn(f"{name} was dropped without being closed", ResourceWarning, stacklevel=2)


def _as_list(x: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(x) if isinstance(x, (list, tuple)) else [x]  # type: ignore[list-item]  # checked with the payloads
