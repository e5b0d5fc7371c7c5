"""Checks of the arguments of a communicator's methods, each with the values in its error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch

from fusco.api.handle import Handle, version_of
from fusco.core.config import Capacity, Launch, StaticRows
from fusco.core.errors import name_ranks
from fusco.core.integers import MAX_INT32, check_integer
from fusco.core.placement import ExpertPlacement
from fusco.core.quantization import QUANTIZED_DTYPES, Quantize
from fusco.core.rows import ROW_DTYPES, require_movable_tensors, row_bytes, wants_grad, why_not_movable
from fusco.core.segments import Segments
from fusco.cuda.memory.layout import MAX_PAYLOADS
from fusco.planner.balancer import Balancer
from fusco.planner.routing import Routing

MAX_DIMS = 6  # a record's text has room for as many with MAX_PAYLOADS, for any sizes
_DEFAULT_LAUNCH = Launch()
_Checks = TypeVar("_Checks", bound="Checks")


@dataclass(frozen=True, kw_only=True)
class Checks:
    """What one rank's communicator was made for. Its methods raise ``TypeError`` or ``ValueError`` with values."""

    rank: int
    placement: ExpertPlacement  # of physical experts
    balancer: Balancer
    capacity: Capacity
    wire_dtype: torch.dtype | None
    device: torch.device
    caller_placement: ExpertPlacement | None = None  # when it was made; ``None`` means the same
    widest_row: str = ""  # in the words of the caller that made it; ``""`` for bytes
    members: tuple[int, ...] = ()  # the number of each rank once ranks are absent; ``rank`` counts these
    placement_of_all: ExpertPlacement | None = None  # with the experts of absent ranks; ``None`` if none is absent

    @property
    def number(self) -> int:
        """The number of this rank in the group."""
        return self.members[self.rank] if self.members else self.rank

    @property
    def num_ranks(self) -> int:
        """Ranks of the group, absent ones included."""
        return self.placement_of_all.world_size if self.placement_of_all else self.placement.world_size

    @cached_property
    def number_to_rank(self) -> dict[int, int]:
        """The rank, among those that take part, of each of their numbers."""
        return {number: rank for rank, number in enumerate(self.members or range(self.placement.world_size))}

    def of_members(self: _Checks, members: tuple[int, ...], placement: ExpertPlacement) -> _Checks:
        """Return the same for the ranks that are left; ``placement`` is that of all ranks."""
        absent = set(range(placement.world_size)) - set(members)
        of_callers = placement.without_ranks(absent)
        return replace(
            self,
            rank=members.index(self.rank),
            placement=replace(of_callers.of_members(members).physical),  # another object: handles know theirs
            caller_placement=of_callers,
            members=members,
            placement_of_all=placement,
        )

    @property
    def num_experts(self) -> int:
        """Number of experts that a caller may name."""
        return (self.caller_placement or self.placement).num_experts

    def validate_segments(self, verb: str, segments: Segments, rank: int) -> None:
        """Validate the arguments of ``gather_send`` and ``scatter_recv``: ``rank`` is the other rank."""
        require_movable_tensors(verb)
        self.require_not_capturing(verb)
        if not isinstance(segments, Segments):
            raise TypeError(f"segments must be Segments, got {type(segments).__name__}")
        self._tensor("the base of segments", segments.memory)
        if not isinstance(rank, int):
            raise TypeError(f"a rank must be an integer, got {rank!r}")
        if rank == self.number or rank not in self.number_to_rank:
            raise ValueError(
                f"rank {self.number} cannot exchange segments with rank {rank}: it must be another rank of "
                f"{self._describe_ranks()}"
            )

    def _describe_ranks(self) -> str:
        left = f", of which {name_ranks(self.members)} are left" if self.members else ""
        return f"a group of {self.num_ranks}{left}"

    def require_routing(self, routing: Routing) -> None:
        """Raise unless ``routing`` is valid for a dispatch."""
        for name, tensor in (("topk_idx", routing.topk_idx), ("topk_weights", routing.topk_weights)):
            if tensor is not None:
                self._tensor(name, tensor)
        if routing.num_topk > self.capacity.num_topk:
            raise ValueError(
                f"topk_idx has {routing.num_topk} experts per token, but the communicator was made for num_topk="
                f"{self.capacity.num_topk}"
            )

    def require_alignment(self, alignment: int) -> None:
        """Raise unless blocks may have this alignment: rows are counted in 32 bits, those of any routing."""
        check_integer("expert_alignment", alignment, least=1, most=MAX_INT32)
        placement, capacity = self.placement, self.capacity
        num_pairs = placement.world_size * capacity.max_tokens_per_rank * capacity.num_topk
        num_rows = num_pairs + len(placement.rank_to_experts[self.rank]) * (alignment - 1)
        if alignment > 1 and num_rows > MAX_INT32:
            raise ValueError(
                f"expert_alignment={alignment} may pad this rank's rows to {num_rows}, more than {MAX_INT32}"
            )

    def require_static(self, static: StaticRows | None, alignment: int) -> None:
        """Raise unless ``static`` is valid for blocks of an alignment and, during a graph capture, given."""
        if static is not None and not isinstance(static, StaticRows):
            raise TypeError(f"static must be StaticRows, got {type(static).__name__}")
        if static is None and self.is_capturing:
            raise ValueError(
                "a dispatch with an output of exact size waits on the host, so it cannot be captured in a CUDA graph; "
                "pass static=StaticRows(num_rows), or StaticRows(rows_per_expert=c)"
            )
        if static is None or static.rows_per_expert is None:
            return
        num_local, rows_per_expert = len(self.placement.rank_to_experts[self.rank]), static.rows_per_expert
        if static.num_slots(num_local) > MAX_INT32:
            raise ValueError(
                f"rows_per_expert={rows_per_expert} for {num_local} experts of this rank are "
                f"{static.num_slots(num_local)} rows, more than {MAX_INT32}"
            )
        self.require_alignment(alignment)
        if rows_per_expert % alignment:
            raise ValueError(
                f"rows_per_expert={rows_per_expert} is not a multiple of expert_alignment={alignment}: blocks of "
                f"experts would not be aligned"
            )

    def require_not_capturing(self, verb: str) -> None:
        """Raise if a verb is captured; it waits on the host for the device."""
        if self.is_capturing:
            raise ValueError(
                f"{verb} waits on the host, so it cannot be captured in a CUDA graph; call it outside the capture"
            )

    def require_payloads(self, payloads: Sequence[torch.Tensor], num_tokens: int) -> None:
        """Raise unless ``payloads`` are valid rows for a dispatch."""
        if not 1 <= len(payloads) <= MAX_PAYLOADS:
            raise ValueError(f"dispatch takes 1 to {MAX_PAYLOADS} payloads, got {len(payloads)}")
        for i, payload in enumerate(payloads):
            self._tensor(f"payload {i}", payload)
            if payload.ndim < 1 or len(payload) != num_tokens:
                raise ValueError(f"payload {i} has shape {tuple(payload.shape)}, the routing {num_tokens} tokens")
            if payload.ndim > MAX_DIMS:
                raise ValueError(f"payload {i} has {payload.ndim} dimensions, at most {MAX_DIMS} are supported")
        if len(payloads) > 1 and any(map(wants_grad, payloads)):
            raise ValueError("gradients flow through a single payload only; detach these, or dispatch them apart")
        if num_tokens > self.capacity.max_tokens_per_rank:
            fixed = "; in a CUDA graph sizes are fixed: dispatch as many once before the capture" * self.is_capturing
            raise ValueError(
                f"{num_tokens} tokens, but the communicator was made for max_tokens_per_rank="
                f"{self.capacity.max_tokens_per_rank}{fixed}"
            )
        self._row_bytes(payloads, sum(map(row_bytes, payloads)))

    def require_quantizable(self, payloads: Sequence[torch.Tensor], quantize: Quantize) -> None:
        """Raise unless ``payloads`` are rows that ``quantize`` is for: one tensor of whole blocks."""
        require_movable_tensors("dispatch")
        if not isinstance(quantize, Quantize):
            raise TypeError(f"quantize must be a Quantize, got {quantize!r}")
        if len(payloads) != 1:
            raise ValueError(f"dispatch quantises one tensor of rows, got {len(payloads)} payloads")
        (x,) = payloads
        self._tensor("x", x)
        if x.dtype not in QUANTIZED_DTYPES:
            raise TypeError(f"dispatch quantises {', '.join(map(str, QUANTIZED_DTYPES))}, got {x.dtype}")
        if x.ndim != 2 or not x.shape[1] or x.shape[1] % quantize.columns:
            raise ValueError(
                f"rows to quantise must be (num_tokens, a multiple of {quantize.columns}), as each block of "
                f"{quantize.format!r} has that many columns, got {tuple(x.shape)}"
            )
        if wants_grad(x) and not quantize.straight_through:
            raise ValueError(
                "x requires gradients, which quantised rows have none of: pass Quantize(straight_through=True) to let "
                "them through as if nothing were quantised, or x.detach()"
            )

    def require_expert_rows(self, y: torch.Tensor, handle: Handle) -> None:
        """Raise unless ``y`` are valid expert-major rows for a combine."""
        self._tensor("y", y)
        if y.dtype not in ROW_DTYPES:
            raise TypeError(f"combine sums {', '.join(map(str, ROW_DTYPES))}, got {y.dtype}")
        if y.ndim != 2 or len(y) != handle.num_rows:
            shape = ", ".join(map(str, handle.rows_shape))
            raise ValueError(f"y must be ({shape}, hidden), as dispatch returned, got {tuple(y.shape)}")
        self._row_bytes([y], y.shape[1] * torch.promote_types(y.dtype, self.wire_dtype or y.dtype).itemsize)

    def require_weights(self, topk_weights: torch.Tensor, handle: Handle) -> None:
        """Raise unless ``topk_weights`` has a weight for each token and k of a dispatch of this communicator."""
        self.require_handle(handle)
        self._tensor("topk_weights", topk_weights)
        if topk_weights.dtype not in ROW_DTYPES:
            raise TypeError(f"topk_weights must be one of {', '.join(map(str, ROW_DTYPES))}, got {topk_weights.dtype}")
        if topk_weights.shape != (handle.num_tokens, handle.num_topk):
            raise ValueError(
                f"topk_weights has shape {tuple(topk_weights.shape)}, the handle's routing "
                f"{(handle.num_tokens, handle.num_topk)}"
            )

    def require_values(self, values: torch.Tensor, handle: Handle) -> None:
        """Raise unless ``values`` has one for each row of a dispatch of this communicator."""
        self.require_handle(handle)
        self._tensor("values", values)
        if not values.is_floating_point():
            raise TypeError(f"values must be of a floating-point dtype, got {values.dtype}")
        if values.shape != handle.rows_shape:
            raise ValueError(f"values must have shape {handle.rows_shape}, a value of each row, got {[*values.shape]}")

    def require_experts(self, name: str, tensors: Sequence[torch.Tensor], num_places: int) -> None:
        """Raise unless ``tensors`` are weights of as many experts: tensors (P, ...) with contiguous rows."""
        if not isinstance(tensors, Sequence):
            raise TypeError(f"{name} must be a sequence of tensors, got {type(tensors).__name__}")
        for i, tensor in enumerate(tensors):
            self._tensor(f"{name}[{i}]", tensor)
            if tensor.ndim < 1 or len(tensor) < num_places:
                raise ValueError(f"{name}[{i}] has shape {tuple(tensor.shape)}, but this rank has {num_places} places")
            if tensor.is_conj() or tensor.is_neg():
                raise ValueError(f"{name}[{i}] is conjugated or negated when read; pass it resolved")
            if len(tensor) and not (tensor[0].is_contiguous() and self._is_apart(tensor)):
                raise ValueError(
                    f"{name}[{i}] needs contiguous rows that do not overlap, got strides {tensor.stride()}"
                )

    @staticmethod
    def _is_apart(tensor: torch.Tensor) -> bool:
        return len(tensor) < 2 or tensor.stride(0) >= tensor[0].numel()

    def require_launch(self, launch: Launch | None) -> Launch:
        """Raise unless ``launch`` has valid device settings; return it, or the defaults for ``None``."""
        if launch is None:
            return _DEFAULT_LAUNCH
        if not isinstance(launch, Launch):
            raise TypeError(f"launch must be a Launch, got {launch!r}")
        event_device = None if launch.event is None else launch.event.device  # None until it is first recorded
        if self.device.type == "cuda" and event_device not in (None, self.device):
            raise ValueError(f"the launch's event is of {event_device}, the communicator on {self.device}")
        return launch

    def require_combine_weights(self, weights: object) -> None:
        """Raise unless ``weights`` are a choice of a combine."""
        if weights is None or (isinstance(weights, str) and weights == "topk"):
            return
        if isinstance(weights, torch.Tensor):
            raise TypeError("weights of combine must be 'topk' or None, got a tensor; multiply y by it, and pass None")
        raise ValueError(f"weights of combine must be 'topk' or None, got {weights!r}")

    def require_unchanged_weights(self, handle: Handle) -> None:
        """Raise ``ValueError`` if gradients would flow to weights that were changed in place since they were sent."""
        if wants_grad(handle.topk_weights) and version_of(handle.topk_weights) != handle.weights_version:
            raise ValueError(
                f"topk_weights were changed in place since their dispatch (version {handle.weights_version} was sent, "
                f"{version_of(handle.topk_weights)} is here), so their gradients would be wrong: change a copy"
            )

    def require_handle(self, handle: Handle) -> None:
        """Raise unless ``handle`` comes from this communicator."""
        if not isinstance(handle, Handle):
            raise TypeError(f"handle must be the handle of a dispatch (sent.handle), got {type(handle).__name__}")
        if handle.plan.rank != self.rank or handle.plan.placement is not self.placement:
            or_members = ", or from before its members changed" if self.members else ""
            raise ValueError(
                f"the handle (of {handle.num_tokens} tokens, top-{handle.num_topk}) comes from another communicator"
                f"{or_members}: use it with the one whose dispatch returned it"
            )

    def require_partners(self, *payloads: Mapping[int, Segments]) -> None:
        """Raise unless ``payloads`` map ranks of the group to segments."""
        for part in payloads:
            if not isinstance(part, Mapping):
                raise TypeError(f"shuffle takes mappings from ranks to Segments, got {type(part).__name__}")
        for rank, segments in ((rank, part[rank]) for part in payloads for rank in part):
            if not isinstance(rank, int):
                raise TypeError(f"shuffle takes mappings from ranks, which are integers, got {rank!r}")
            if not isinstance(segments, Segments):
                raise TypeError(f"shuffle takes Segments, got {type(segments).__name__} for rank {rank}")
            self._tensor(f"the base of segments for rank {rank}", segments.memory)
        outside = sorted({rank for part in payloads for rank in part} - self.number_to_rank.keys())
        if outside:
            raise ValueError(f"shuffle names rank(s) {outside} outside {self._describe_ranks()}")

    @property
    def is_capturing(self) -> bool:
        """True while this rank captures a CUDA graph."""
        return self.device.index is not None and torch.cuda.is_current_stream_capturing()  # the CPU has no index

    def _tensor(self, name: str, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if why_not := why_not_movable(tensor):
            raise TypeError(f"{name} {why_not}")
        if tensor.device != self.device:
            raise ValueError(f"{name} is on {tensor.device}, the communicator on {self.device}")

    def _row_bytes(self, payloads: Sequence[torch.Tensor], num_bytes: int) -> None:
        if num_bytes < 1:
            raise ValueError("rows without elements cannot be moved")
        if num_bytes > self.capacity.max_row_bytes:
            raise ValueError(
                f"a token is {' and '.join(map(_values, payloads))}, {num_bytes} bytes as it travels, but the "
                f"communicator was made for "
                f"{self.widest_row or f'max_bytes_per_token={self.capacity.max_bytes_per_token}'}: make it with the "
                f"hidden and dtype of these rows"
            )


def _values(rows: torch.Tensor) -> str:
    return f"{rows.shape[1:].numel()} values of {str(rows.dtype).removeprefix('torch.')}"
