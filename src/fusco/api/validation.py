"""Requests of verbs, made of valid arguments before any rank waits for another; inputs known from earlier calls."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from fusco.api.checks import MAX_DIMS, Checks
from fusco.api.handle import Handle
from fusco.api.known_inputs import KnownInput, KnownInputs
from fusco.control.fingerprint import CollectiveFingerprint
from fusco.core.config import Launch, StaticRows
from fusco.core.rows import describe_rows, plain, wants_grad
from fusco.core.segments import Segments
from fusco.core.topology import ScheduleMode
from fusco.cuda.memory.layout import MAX_PAYLOADS
from fusco.engine.base import AllToAllRequest, CombineRequest, DispatchRequest, RedispatchRequest, ShuffleRequest
from fusco.engine.quantizer import Origin
from fusco.planner.balancer import has_lanes
from fusco.planner.routing import Routing

_SENT_DTYPES = (torch.float32, torch.float64)  # of weights; others travel as float32
_MAX_ROWS = 2**63 - 1  # PyTorch counts in int64


@dataclass(frozen=True, kw_only=True)
class Validator(Checks):
    """Makes requests of valid arguments of one rank's communicator.

    Each verb has a ``validate_`` method; those of collectives return a request. Verbs with a handle, or that return
    one, validate an input in full once. If only values and addresses differ from an earlier one, they check what
    depends on these: expert ids on the CPU, freed memory, the handle, the launch, whether the call is captured.
    """

    _known: KnownInputs = field(default_factory=KnownInputs, init=False, repr=False, compare=False)
    _known_rows: KnownInputs = field(
        default_factory=lambda: KnownInputs(has_any_rows=True), init=False, repr=False, compare=False
    )

    def validate_dispatch(
        self,
        payloads: Sequence[torch.Tensor],
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        alignment: int = 1,
        with_weights: bool = False,  # noqa: FBT001, FBT002  passed by position
        static: StaticRows | None = None,
        launch: Launch | None = None,
        origin: Origin | None = None,
    ) -> DispatchRequest:
        """Validate the arguments of ``dispatch``; for ``origin`` see ``DispatchRequest``."""
        if static is not None or self.is_capturing:
            self.require_static(static, alignment)
        known = self.known_dispatch(payloads, topk_idx, topk_weights, alignment, with_weights, origin)
        if known is None:
            self.require_alignment(alignment)
            if with_weights and topk_weights is None:
                raise ValueError("with_weights=True needs topk_weights")
        routing = Routing(topk_idx, topk_weights)
        if known is None:
            self.require_routing(routing)
            self.require_payloads(payloads, routing.num_tokens)
        if self.device.type == "cpu":  # on CUDA the plan checks them, as a check here would wait for the device
            routing.check_expert_ids(self.placement.num_experts, self.num_experts)
        if topk_weights is not None and (topk_weights.requires_grad or topk_weights.dtype not in _SENT_DTYPES):
            detached = topk_weights.detach()
            routing = Routing(topk_idx, detached if detached.dtype in _SENT_DTYPES else detached.float())
        request = DispatchRequest(
            routing=routing,
            topk_weights=topk_weights,
            payloads=payloads,
            placement=self.placement,
            balancer=self.balancer,
            expert_alignment=alignment,
            with_weights=with_weights,
            static=static,
            launch=self.require_launch(launch),
            origin=origin,
            known=known,
        )
        if known is None:
            known_by = _known_by(payloads, topk_idx, topk_weights, alignment, with_weights, origin)
            self._known.add(CollectiveFingerprint("dispatch", request.fields), *known_by)
        return request

    def known_dispatch(
        self,
        payloads: Sequence[torch.Tensor],
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        alignment: int,
        with_weights: bool,  # noqa: FBT001  passed by position
        origin: Origin | None = None,
    ) -> KnownInput | None:
        """Return what is known of these arguments of ``validate_dispatch``; the others are not compared."""
        return self._known.find(*_known_by(payloads, topk_idx, topk_weights, alignment, with_weights, origin))

    def validate_redispatch(
        self,
        payloads: Sequence[torch.Tensor],
        handle: Handle,
        launch: Launch | None = None,
        origin: Origin | None = None,
    ) -> RedispatchRequest[Any]:
        """Validate the arguments of ``dispatch_again``; the plan is of the communicator's backend."""
        known = self.known_redispatch(payloads, handle, origin)
        if known is None:
            self.require_payloads(payloads, handle.num_tokens)
        launch = self.require_launch(launch)
        request: RedispatchRequest[Any] = RedispatchRequest(
            payloads=payloads, plan=handle.plan, handle=handle.number, launch=launch, origin=origin, known=known
        )
        if known is None:
            fingerprint = CollectiveFingerprint("dispatch_again", request.fields)
            self._known.add(fingerprint, payloads, _options_of_redispatch(payloads, handle, origin))
        return request

    def known_redispatch(
        self, payloads: Sequence[torch.Tensor], handle: Handle, origin: Origin | None = None
    ) -> KnownInput | None:
        """Return what is known of the arguments of ``dispatch_again``; raise if the handle is invalid."""
        self.require_handle(handle)
        return self._known.find(payloads, _options_of_redispatch(payloads, handle, origin))

    def validate_combine(
        self,
        verb: str,
        ys: Sequence[torch.Tensor],
        handle: Handle,
        weights: Literal["topk"] | None = "topk",
        launch: Launch | None = None,
    ) -> CombineRequest[Any]:
        """Validate the arguments of ``combine`` or ``combine_all``; the plan is of the communicator's backend."""
        known = self.known_combine(verb, ys, handle, weights)
        topk_weights = None if weights is None else handle.topk_weights
        if known is None:
            for y in ys:
                self.require_expert_rows(y, handle)
        launch = self.require_launch(launch)
        request: CombineRequest[Any] = CombineRequest(
            rows=ys, plan=handle.plan, topk_weights=topk_weights, handle=handle.number, launch=launch, known=known
        )
        if known is None:
            fingerprint = CollectiveFingerprint(verb, request.fields)
            self._known_rows.add(fingerprint, ys, _options_of_combine(verb, ys, topk_weights))
        return request

    def several(self, ys: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of ``combine_all``, which are not looked at; raise for a wrong number of them."""
        if not isinstance(ys, (list, tuple)) and (isinstance(ys, torch.Tensor) or not isinstance(ys, Iterable)):
            raise TypeError(f"combine_all takes a sequence of tensors, got {type(ys).__name__}")
        tensors = list(ys)
        if not 1 <= len(tensors) <= MAX_PAYLOADS:
            raise ValueError(f"combine_all takes 1 to {MAX_PAYLOADS} tensors, got {len(tensors)}")
        return tensors

    def known_combine(
        self, verb: str, ys: Sequence[torch.Tensor], handle: Handle, weights: Literal["topk"] | None
    ) -> KnownInput | None:
        """Return what is known of the arguments of ``validate_combine``; raise if handle or ``weights`` are invalid."""
        self.require_handle(handle)
        self.require_combine_weights(weights)
        topk_weights = None if weights is None else handle.topk_weights
        if topk_weights is not None and topk_weights.requires_grad:
            self.require_unchanged_weights(handle)
        options = _options_of_combine(verb, ys, topk_weights)
        num_slots = handle.plan.num_slots
        if (known := self._known_rows.find(ys, options, num_slots)) is not None:
            for y in ys:
                if y.shape[0] != num_slots:
                    return None
        return known

    def validate_shuffle(self, send: Mapping[int, Segments], receive: Mapping[int, Segments]) -> ShuffleRequest:
        """Validate the arguments of ``shuffle``."""
        self.require_not_capturing("shuffle")
        self.require_partners(send, receive)
        if self.members:
            send, receive = ({self.number_to_rank[each]: part[each] for each in part} for part in (send, receive))
        return ShuffleRequest(send=send, receive=receive, has_lanes=has_lanes(self.balancer))

    def validate_all_to_all(
        self,
        output: torch.Tensor | None,
        input_: torch.Tensor,
        splits: tuple[Sequence[int] | None, Sequence[int] | None],
        mode: ScheduleMode | None,
    ) -> AllToAllRequest:
        """Validate the arguments of ``all_to_all``; ``splits`` are those of the output, then those of the input.

        For ``output=None`` the request has a new tensor.
        """
        self.require_not_capturing("all_to_all")
        for name, tensor in (*([] if output is None else [("output", output)]), ("input", input_)):
            self._tensor(name, tensor)
            if tensor.ndim < 1 or tensor.ndim > MAX_DIMS:
                raise ValueError(f"{name} has {tensor.ndim} dimensions, all_to_all takes 1 to {MAX_DIMS}")
        if mode not in (None, "exact", "few", "spread-out"):
            raise ValueError(f"schedule must be one of None, 'exact', 'few', 'spread-out', got {mode!r}")
        source = plain(input_)
        if output is not None:
            require_output(output, input_, source)
        send_rows = self._rows_of_ranks("input", len(source), splits[1])
        if output is None:
            receive_rows = self._rows_of_ranks("output", len(source) if splits[0] is None else None, splits[0])
            output = torch.empty((sum(receive_rows), *source.shape[1:]), dtype=source.dtype, device=source.device)
        else:
            receive_rows = self._rows_of_ranks("output", len(output), splits[0])
        return AllToAllRequest(
            input=source,
            output=output,
            send_rows=send_rows,
            receive_rows=receive_rows,
            mode=mode,
            requires_grad=wants_grad(input_),
        )

    def rows_of_group(self, rows: Sequence[int]) -> list[int]:
        """Return rows of the ranks that are left by rank of the group: none of absent ones."""
        return [rows[self.number_to_rank[rank]] if rank in self.number_to_rank else 0 for rank in range(self.num_ranks)]

    def _rows_of_ranks(self, name: str, num_rows: int | None, sizes: Sequence[int] | None) -> tuple[int, ...]:
        """Return the rows of each rank that is left; ``sizes`` have those of absent ranks, too, which must be 0."""
        if sizes is None or not self.members:
            return rows_of_ranks(name, self.placement.world_size, num_rows, sizes)
        rows = rows_of_ranks(name, self.num_ranks, num_rows, sizes)
        if given := [rank for rank, number in enumerate(rows) if number and rank not in self.number_to_rank]:
            raise ValueError(f"{name}_split_sizes has {rows[given[0]]} rows for rank {given[0]}, which is absent")
        return tuple(rows[number] for number in self.members)


def _known_by(
    payloads: Sequence[torch.Tensor],
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    alignment: int,
    with_weights: object,
    origin: Origin | None,
) -> tuple[Sequence[torch.Tensor], tuple[object, ...]]:
    """Return the tensors, then the options, by which the input of a dispatch is known."""
    tensors = (*payloads, topk_idx) if topk_weights is None else (*payloads, topk_idx, topk_weights)
    return tensors, (
        "dispatch",
        topk_weights is None,
        len(payloads),
        type(alignment),
        alignment,
        not with_weights,
        origin.text if origin else "",
    )


def _options_of_redispatch(
    payloads: Sequence[torch.Tensor], handle: Handle, origin: Origin | None
) -> tuple[object, ...]:
    """Return the options, besides payloads, by which the input of ``dispatch_again`` is known."""
    return "dispatch_again", len(payloads), handle.num_tokens, origin.text if origin else ""


def _options_of_combine(verb: str, ys: Sequence[torch.Tensor], topk_weights: torch.Tensor | None) -> tuple[object, ...]:
    """Return the options, besides rows, by which the input of a combine is known."""
    return verb, len(ys), topk_weights is None, wants_grad(topk_weights)


def rows_of_ranks(name: str, world_size: int, num_rows: int | None, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """Return the rows of each rank, as ``sizes`` say; ``None`` means an equal number of ``num_rows`` each.

    ``name`` is ``"input"`` or ``"output"``. Without ``num_rows`` any total of the sizes will do. Raises ``TypeError``
    or ``ValueError`` for sizes that do not fit, with values.
    """
    if sizes is None:
        assert num_rows is not None
        if num_rows % world_size:
            raise ValueError(
                f"{name} has {num_rows} rows, which do not divide evenly among {world_size} ranks; "
                f"pass {name}_split_sizes"
            )
        return (num_rows // world_size,) * world_size
    try:
        rows = tuple(map(operator.index, sizes))
    except TypeError:
        raise TypeError(f"{name}_split_sizes must be a sequence of integers, got {sizes!r}") from None
    if len(rows) != world_size:
        raise ValueError(f"{name}_split_sizes has {len(rows)} entries for a group of {world_size} ranks")
    if min(rows) < 0:
        raise ValueError(f"{name}_split_sizes must not be negative, got {rows[rows.index(min(rows))]} in {rows}")
    if num_rows is None and sum(rows) > _MAX_ROWS:
        raise ValueError(f"{name}_split_sizes {rows} sum to {sum(rows)}, more rows than a tensor can have")
    if num_rows is not None and sum(rows) != num_rows:
        raise ValueError(f"{name}_split_sizes {rows} sum to {sum(rows)}, but {name} has {num_rows} rows")
    return rows


def require_output(output: torch.Tensor, input_: torch.Tensor, source: torch.Tensor) -> None:
    """Raise ``ValueError`` unless an all-to-all of ``input_``, whose values ``source`` has, may write to ``output``."""
    if output.dtype != input_.dtype or output.shape[1:] != input_.shape[1:]:
        raise ValueError(
            f"output has rows of {describe_rows(output)}, input of {describe_rows(input_)}; they must be equal"
        )
    if not output.is_contiguous() or output.is_conj() or output.is_neg():
        raise ValueError(f"output must be contiguous and own its values, got strides {output.stride()}")
    if wants_grad(input_) or wants_grad(output):
        raise ValueError(
            "gradients flow only through an output that all_to_all makes: pass None as output and use the result, or "
            "detach input and output"
        )
    begin, other = output.data_ptr(), source.data_ptr()
    if begin < other + source.nbytes and other < begin + output.nbytes:
        raise ValueError(
            f"input and output overlap in memory: {source.nbytes} bytes at {other:#x}, {output.nbytes} at {begin:#x}"
        )
