"""Public verbs of tokens and experts: dispatch, combine and their kin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from fusco.api.autograd import CombineRows, DispatchRows, Precomputed, Verbs, rows_of_weights, weights_of_slots
from fusco.api.create import CommunicatorConfig, CommunicatorParts, create
from fusco.api.given_rows import as_list, as_matrix, as_slots
from fusco.api.handle import Dispatched, Handle, without_weights
from fusco.api.moves import ExpertMoves
from fusco.api.quantized import QuantizedRows, quantized
from fusco.api.uncompiled import limited
from fusco.core.balance import Balance
from fusco.core.config import Launch, Settings, StaticRows
from fusco.core.placement import ExpertPlacement
from fusco.core.quantization import Quantize
from fusco.core.rows import wants_grad
from fusco.placement.placement import PlannedPlacement
from fusco.planner.balancer import Balancer


class Communicator(ExpertMoves):
    """One rank's endpoint of expert-parallel communication among the ranks of a process group.

    The constructor is a collective, and so is every verb but ``gather_send`` and ``scatter_recv``: all ranks call the
    same ones in the same order. Gradients flow through ``dispatch``, ``combine`` and ``all_to_all``. An input requires
    them on all ranks or on none, as the backward pass communicates, too.

    Every collective with input raises ``TypeError`` or ``ValueError`` for this rank's bad input, and
    ``RejectedInputError`` on all other ranks. It raises ``MismatchError`` on all ranks if inputs do not go together,
    and ``PeerFailureError`` if a rank fails or does not arrive within ``settings.timeout_s``; then the communicator
    goes on with ``shrink``, or is closed. Every verb takes ``timeout_s``, a limit of this call on this rank in place of
    that one, as ``limit`` gives several calls one; calls of a backward pass keep that of the settings.
    Use it in a ``with`` block, or call ``close``. If it is dropped unclosed, resources are released with a
    ``ResourceWarning``, and the other ranks learn that this one has left.

    A communicator belongs to one thread: the first that calls a verb, even if another one made it. Another thread gets
    a ``ThreadError`` at once, unless the first has ended or has called ``hand_over``. A backward pass may call verbs in
    autograd's threads. ``close`` and ``abort`` may come from any thread while no call is under way. In a forked
    process, verbs raise ``ClosedError``, and the end of the process does nothing.

    ``torch.compile`` calls verbs and does not trace them: a graph ends before a call, the next begins after it, and
    ``fullgraph=True`` is refused. ``fusco.fsdp.FuscoDispatcher`` has operators that can be part of a graph.
    """

    def __init__(  # noqa: PLR0913  all by name
        self,
        group: dist.ProcessGroup | None = None,
        *,
        num_experts: int,
        num_topk: int,
        max_tokens_per_rank: int | None,
        hidden: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        max_bytes_per_token: int | None = None,
        expert_placement: ExpertPlacement | PlannedPlacement | Sequence[Any] | None = None,
        ranks_per_node: int | None = None,
        balancer: Balancer | str | None = None,
        settings: Settings | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        """Make the communicator, together with all other ranks of the group.

        Args:
            group: the process group, of any backend; ``None`` means the default one.
            num_experts: number of experts of all ranks together, at most 2**20.
            num_topk: maximum number of experts per token (top-k); on CUDA at most 32.
            max_tokens_per_rank: maximum number of tokens that a rank dispatches in one call. ``None`` grows: a dispatch
                that does not fit makes room on all ranks, for the next power of two. Handles stay valid; all sizes take
                at most twice the last one's memory. In a CUDA graph, and after ``shrink`` or ``grow``, it is fixed.
            hidden: values of a token's row, of ``dtype`` in ``dispatch`` and ``combine``.
            dtype: of rows of ``hidden`` values; for FP8 rows that are combined as bfloat16, bfloat16.
            max_bytes_per_token: instead of ``hidden``, the maximum bytes of a token's row, in ``dispatch`` (all
                payloads together) and in ``combine`` (in ``settings.wire_dtype``, if that is wider than the rows').
            expert_placement: the rank of each expert; ``None`` gives every rank an equal run of consecutive experts.
                Or the expert in each place of each rank, (R, P) with -1 for an empty place; an ``ExpertPlacement``, or
                what ``fusco.placement.plan_placement`` returns. Then an expert may be on several ranks, ``place``
                replaces the placement, and ``Dispatched`` has a block of rows for each place.
            ranks_per_node: number of consecutive ranks in a node; ``None`` derives nodes from the ranks' hosts.
            balancer: a name of ``fusco.BALANCERS``, or a pure function of the traffic that chooses who sends and who
                forwards, the same on all ranks; ``None`` means ``"lanes"`` on the CPU, ``"send-and-receive"`` on CUDA.
                With a function of your own, every dispatch between nodes compares its results on all ranks in a
                second exchange of records, and raises ``MismatchError`` if they differ. With ``"lanes"``, ranks of a
                node also send segments of ``shuffle`` for each other.
            settings: slices, rings, limits; ``None`` means the defaults.
            device: ``"cpu"``, ``"cuda"`` (the current device, so call ``torch.cuda.set_device`` first) or ``"cuda:i"``.
                On CUDA each rank needs its own device. Ranks of a node communicate over NVLink, nodes over NCCL.

        Raises:
            ValueError: for sizes, a placement, a topology or a device that do not fit together.
            MismatchError: if ranks give different values; RejectedInputError: if another rank's were rejected.
            SharedMemoryError: if there is not enough memory; see ``memory_size_hint``.
            PeerFailureError: if a rank does not arrive within ``settings.timeout_s``.
        """
        config = CommunicatorConfig(
            num_experts=num_experts,
            num_topk=num_topk,
            max_tokens_per_rank=max_tokens_per_rank,
            hidden=hidden,
            dtype=dtype,
            max_bytes_per_token=max_bytes_per_token,
            expert_placement=expert_placement,
            ranks_per_node=ranks_per_node,
            balancer=balancer,
            device=device,
            settings=Settings() if settings is None else settings,
        )
        self._join(create(group, config))

    @classmethod
    def of_parts(cls, parts: CommunicatorParts) -> Communicator:
        """Return a communicator of existing parts, connected to other ranks or simulated."""
        communicator = cls.__new__(cls)
        communicator._join(parts)  # noqa: SLF001  of this class
        return communicator

    @limited
    def dispatch(  # noqa: PLR0913  all by name
        self,
        x: torch.Tensor | Sequence[torch.Tensor],
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        expert_alignment: int = 1,
        with_weights: bool = False,
        static: StaticRows | None = None,
        quantize: Quantize | None = None,
        balance: Balance | None = None,
        launch: Launch | None = None,
        timeout_s: float | None = None,
    ) -> Dispatched:
        """Send every token to its experts; rows arrive expert-major on the ranks that own them.

        Args:
            x: rows (num_tokens, ...) of any dtype, at most 6 dimensions; or up to 8 payloads with the same routing,
                such as FP8 values and their scales. Several payloads have no gradients.
            topk_idx: int32 or int64 (num_tokens, num_topk); -1 means no expert. If an expert is in several places,
                ``place`` says which of them gets a row.
            topk_weights: float16, bfloat16, float32 or float64 (num_tokens, num_topk), the weights that ``combine``
                applies. They travel as float32, float64 as float64.
            expert_alignment: every expert's block is padded with zero rows to a multiple of this, which must divide
                ``StaticRows.rows_per_expert``. Ranks may differ.
            with_weights: return the weight of every row, too.
            static: a fixed size for the output. ``None`` means exactly as large as needed; on CUDA the host then waits
                until the plan is made. With a fixed size the host does not wait for the device, and the call can be
                captured in a CUDA graph (by all ranks, and replayed by all in the same order). Between nodes messages
                then have a fixed size, too, and all ranks pass it or none; call once before the capture, and delete
                graphs before ``close``. All calls run in the order in which they are launched, on all streams. Replays
                of graphs are outside this order: the caller must order them, and calls on other streams at the same
                time. With ``StaticRows(rows_per_expert=c)`` rows have the shape (num_local_experts, c, ...), which
                masked grouped matrix products read.
            quantize: send the rows, bfloat16, float16 or float32 (num_tokens, hidden), as values of 8 or 4 bits with
                scales, the same on all ranks; then the payloads are values and scales. See ``Quantize``.
            balance: plan the batch as ``plan_batch`` does, the same on all ranks, and follow the plan, which the result
                has. On the CPU counts travel with those of the dispatch as long as batches need no copies.
            launch: device settings. Gradients use the same number of SMs, on the caller's stream.

        Returns:
            Rows, counts, weights if requested, and the handle. With ``Launch(own_stream=True)``, call its ``wait``
            before a stream reads it.

        Raises:
            RowOverflowError: on a rank whose static output, or message to another node, is too small. The CPU raises it
                here, CUDA from ``synchronize``, ``close``, or the first collective that begins once the device has made
                the plan, which all ranks then cancel. If the device has not yet when an exactly sized dispatch begins,
                that dispatch waits for it and raises the error, on this rank alone: on others it is complete.
            OutputMemoryError: on a rank without memory for its rows, on the CPU; the communicator is broken then.
        """
        payloads, made_of, origin = as_list(x), None, None
        if quantize is not None and (made_of := self._quantized("dispatch", payloads, quantize, launch)):
            payloads, origin = made_of.payloads, made_of.origin
        send = self._send if balance is None else partial(self._send_balanced, balance)
        send = partial(self._with_room, send) if self._grows else send
        sent = send(payloads, topk_idx, topk_weights, expert_alignment, with_weights, static, launch, origin)
        if made_of:
            sent = made_of.arrived(sent)
        source = made_of.x if made_of else payloads[0]
        if not (with_weights or wants_grad(source)):
            return sent
        made = Precomputed(made_of.gradient_rows(sent) if made_of else sent.rows, sent.weights)
        given = topk_weights if with_weights else None
        rows, weights = DispatchRows.apply(source, given, made, sent.handle, self._verbs(launch))  # type: ignore[no-untyped-call]
        if made_of:
            return replace(sent, gradients=rows if wants_grad(source) else None, weights=weights)
        return replace(sent, payloads=(rows, *sent.payloads[1:]), weights=weights)

    @limited
    def dispatch_again(
        self,
        x: torch.Tensor | Sequence[torch.Tensor],
        handle: Handle,
        *,
        quantize: Quantize | None = None,
        launch: Launch | None = None,
        timeout_s: float | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Send other rows along the routing of a handle, without planning again.

        Args:
            x: as in ``dispatch``, with as many tokens as the handle has.
            handle: from one ``dispatch`` of this communicator, the same on all ranks.
            quantize: as in ``dispatch``, whether that one had it or not; then there are no gradients.
            launch: device settings; with ``own_stream``, pass an ``event`` to wait for this call. Gradients use the
                same number of SMs, on the caller's stream.

        Returns:
            The expert-major rows of each payload, as in ``dispatch``: values and scales of those that are quantised.
        """
        payloads = as_list(x)
        if quantize is not None and (made_of := self._quantized("dispatch_again", payloads, quantize, launch, handle)):
            values, scales = self._move_again(made_of.payloads, handle, launch, made_of.origin)
            return values, made_of.laid_out(scales)[0]
        rows = self._move_again(payloads, handle, launch)
        if wants_grad(payloads[0]):
            made = Precomputed(rows[0])
            rows[0], _ = DispatchRows.apply(payloads[0], None, made, handle, self._verbs(launch))  # type: ignore[no-untyped-call]
        return tuple(rows)

    @limited
    def combine(
        self,
        y: torch.Tensor,
        handle: Handle,
        *,
        weights: Literal["topk"] | None = "topk",
        launch: Launch | None = None,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """Return expert-major rows to their tokens: ``out[t] = sum_k topk_weights[t, k] * y[row of (t, k)]``.

        Sums are accumulated in float32 (float64 for float64 rows). Between nodes, and on CUDA between ranks, partial
        sums travel in ``settings.wire_dtype``, by default the dtype of ``y``, so that each part of a 16-bit row is
        rounded once more.

        Args:
            y: float16, bfloat16, float32 or float64 (num_rows, hidden), in the layout of the rows of ``dispatch``;
                with ``rows_per_expert`` also (num_local_experts, rows_per_expert, hidden). Padding rows are ignored.
            handle: from the ``dispatch``.
            weights: ``"topk"`` applies the ``topk_weights`` of the dispatch, if it had any. ``None`` adds rows up as
                they are, for experts that have applied the weights. The same on all ranks.
            launch: device settings; with ``own_stream``, pass an ``event`` to wait for this call. Gradients use the
                same number of SMs, on the caller's stream.

        Returns:
            Rows (num_tokens, hidden) of the dtype of ``y``; zero for tokens without experts. Rows that were dropped add
            nothing.
        """
        (out,) = self._sum("combine", [as_slots(y, handle, 3)], handle, weights, launch)
        if wants_grad(y) or (weights and wants_grad(handle.topk_weights)):
            summed = handle if weights else without_weights(handle)
            out = CombineRows.apply(y, summed.topk_weights, Precomputed(out), summed, self._verbs(launch))  # type: ignore[no-untyped-call]
        return out

    @limited
    def combine_all(
        self,
        ys: Sequence[torch.Tensor],
        handle: Handle,
        *,
        launch: Launch | None = None,
        timeout_s: float | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return several tensors of rows to their tokens, as ``combine`` with ``weights=None``; no gradients.

        On CUDA all of them are one collective: ranks agree once.

        Args:
            ys: 1 to 8 tensors (num_rows, ...) of the dtypes of ``combine``, or (num_local_experts, rows_per_expert,
                ...); dtypes and shapes of rows may differ.
            handle: from one ``dispatch`` of this communicator, the same on all ranks.
            launch: device settings, without ``own_stream``.

        Returns:
            Sums (num_tokens, ...) of each, in its dtype.
        """
        with self.rejecting():
            given = self._validator.several(ys)
            self._validator_of(handle).require_handle(handle)
            slots, num_rows = [as_slots(y, handle) for y in given], handle.num_rows
            rows = [as_matrix(y, num_rows) for y in slots]
        sums = self._sum_all(rows, handle, launch)
        for i, y in enumerate(slots):
            if y.ndim != 2:
                sums[i] = sums[i].view(len(sums[i]), *y.shape[1:])
        return tuple(sums)

    def _sum_all(self, rows: Sequence[torch.Tensor], handle: Handle, launch: Launch | None) -> list[torch.Tensor]:
        """``combine_all`` of tensors (num_rows, width)."""
        if self._engine.is_asynchronous:
            return self._sum("combine_all", rows, handle, None, launch)
        # messages are numbered by the collective, so each tensor is one
        verbs = [f"combine_all ({number} of {len(rows)})" for number in range(1, len(rows) + 1)]
        return [self._sum(verb, [y], handle, None, launch)[0] for verb, y in zip(verbs, rows, strict=True)]

    @limited
    def dispatch_weights(
        self,
        topk_weights: torch.Tensor,
        handle: Handle,
        *,
        launch: Launch | None = None,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """Return the weight of each row, for other weights along the routing of a handle; no gradients.

        Their shape is that of the rows: (num_rows,), or (num_local_experts, rows_per_expert). Padding rows have weight
        zero; those that are uninitialised have an undefined one.

        Args:
            topk_weights: float16, bfloat16, float32 or float64 (num_tokens, num_topk); the result has this dtype.
            handle: from one ``dispatch`` of this communicator, the same on all ranks.
            launch: device settings, without ``own_stream``.
        """
        with self.rejecting():
            self._validator_of(handle).require_weights(topk_weights, handle)
        (rows,) = self._move_again([topk_weights.detach()], handle, launch)
        return weights_of_slots(rows, handle)

    @limited
    def combine_weights(
        self, values: torch.Tensor, handle: Handle, *, launch: Launch | None = None, timeout_s: float | None = None
    ) -> torch.Tensor:
        """Return one value of each row to its token and k, such as the gradient of the row's weight; no gradients.

        Args:
            values: (num_rows,), or (num_local_experts, rows_per_expert), of any floating-point dtype; those of padding
                rows are ignored.
            handle: from one ``dispatch`` of this communicator, the same on all ranks.
            launch: device settings, without ``own_stream``.

        Returns:
            float32, or float64 for float64 values (num_tokens, num_topk); zero where ``topk_idx`` is -1.
        """
        with self.rejecting():
            self._validator_of(handle).require_values(values, handle)
            rows = rows_of_weights(values.detach().reshape(-1), handle)
        (sums,) = self._sum_all([rows], handle, launch)
        return sums

    def __enter__(self) -> Communicator:
        return self

    def _quantized(
        self,
        verb: str,
        payloads: Sequence[torch.Tensor],
        quantize: Quantize,
        launch: Launch | None,
        handle: Handle | None = None,
    ) -> QuantizedRows | None:
        """Return the rows of a dispatch as they are sent, quantised; ``None`` if nothing may be launched."""
        if self._session.broken:
            return None
        with self.rejecting(), self._session.access.using(verb):
            return quantized(self._engine.quantizer(), self._validator_of(handle), payloads, quantize, launch, handle)

    def _verbs(self, launch: Launch | None) -> Verbs:
        """Return the verbs of a call's gradients, with as many SMs as the call, on the graph's stream."""
        mirrored = (launch or Launch()).on_callers_stream()
        return Verbs(
            lambda x, handle: self._move_again([x], handle, mirrored)[0],
            lambda y, handle: self._sum("combine", [y], handle, "topk", mirrored)[0],
            lambda ys, handle: self._sum_all(ys, handle, mirrored),
        )
