"""Configuration by the user: capacity and settings of a communicator, launch options and sizes of a call."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch

from fusco.core.integers import MAX_INT32, check_integer
from fusco.core.quantization import Quantize
from fusco.core.topology import RankLinks, Topology

FSDP_SMS = 32  # of a launch beside which collectives of others run, such as FSDP's
_MAX_TIMEOUT_S = 1_000_000  # eleven days; sockets, timers and devices count limits in several integer types
_Config = TypeVar("_Config", bound="EngineConfig")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that all ranks of a communicator share.

    Attributes:
        slice_bytes: maximum size of one message between nodes, and size of one ring slot within a node. Large enough
            that the cost of a message (tens of microseconds over TCP) is small against its transfer, small enough that
            packing, transfer and unpacking of different slices overlap. On the CPU the messages of a dispatch and its
            combine may be smaller, down to a quarter. ``None`` means 1 MiB, but 16 MiB between nodes on CUDA, for all
            nodes together (docs/design.md says why).
        ring_depth: slots of each ring; at least 2, so that producer and consumer can work at the same time.
        timeout_s: the limit of every wait, in seconds, at most 1,000,000. When it runs out, all ranks raise
            ``PeerFailureError``.
        wire_dtype: dtype in which ``combine`` sends partial sums between nodes, on CUDA also between ranks, unless rows
            are wider; ``None`` means the dtype of the rows. ``torch.float32`` sends sums of 16-bit rows as accumulated,
            at twice the bytes. ``Quantize("fp8_e4m3")``, with float32 scales or powers of two as rows, sends sums
            between nodes as codes and scales, at about half of the bytes. Then each sum of another node is off by at
            most 1/16 of it, or by 2**-10 of its block's scale if that is more. Rows that are no whole blocks wide, such
            as the gradients of weights, and float64 rows travel in their dtype.
        slice_order: the order of destination nodes. ``"in-turn"``: a rank sends to all nodes, and ends with all
            together. ``"staged"``: by the stages of a schedule, in each of which a node receives from one node only
            (FAST); for skewed routing on networks that slow down when several nodes send to one.

    Raises:
        TypeError, ValueError: for a value of another type, or out of range.
    """

    slice_bytes: int | None = None
    ring_depth: int = 4
    timeout_s: float = 60.0
    wire_dtype: torch.dtype | Quantize | None = None
    slice_order: Literal["in-turn", "staged"] = "in-turn"

    def __post_init__(self) -> None:
        if self.slice_bytes is not None:
            check_integer("slice_bytes", self.slice_bytes, least=1)
        check_integer("ring_depth", self.ring_depth, least=2)
        if not isinstance(self.timeout_s, (int, float)) or isinstance(self.timeout_s, bool):
            raise TypeError(f"timeout_s must be a number, got {self.timeout_s!r}")
        if not 0 < self.timeout_s <= _MAX_TIMEOUT_S:
            raise ValueError(f"timeout_s must be positive and at most {_MAX_TIMEOUT_S:,}, got {self.timeout_s}")
        if self.slice_order not in ("in-turn", "staged"):
            raise ValueError(f"slice_order must be 'in-turn' or 'staged', got {self.slice_order!r}")
        if isinstance(self.wire_dtype, Quantize):
            if (self.wire_dtype.format, self.wire_dtype.layout) != (
                "fp8_e4m3",
                "row",
            ) or self.wire_dtype.scale == "ue8m0":
                raise ValueError(
                    f"wire_dtype takes Quantize('fp8_e4m3') with scale 'float32' or 'power-of-two' and layout 'row', "
                    f"got {self.wire_dtype}"
                )
        elif self.wire_dtype not in (None, torch.float32):
            raise ValueError(f"wire_dtype must be None, torch.float32 or a Quantize, got {self.wire_dtype}")

    @property
    def sum_dtype(self) -> torch.dtype | None:
        """The dtype that partial sums are widened to, if rows are not wider; ``None`` for that of the rows."""
        return None if isinstance(self.wire_dtype, Quantize) else self.wire_dtype


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Sizes that a communicator allocates memory for, on each rank.

    Attributes:
        max_tokens_per_rank: maximum number of tokens that a rank dispatches in one call.
        max_bytes_per_token: maximum bytes of one token's row in ``dispatch`` (all payloads together) and ``combine``.
        num_topk: maximum number of experts per token (top-k).

    Raises:
        TypeError, ValueError: for a capacity that is no positive integer.
    """

    max_tokens_per_rank: int
    max_bytes_per_token: int
    num_topk: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_integer(name, value, least=1)

    def union(self, other: Capacity) -> Capacity:
        """Return the larger of the two, field by field."""
        return Capacity(**{name: max(value, getattr(other, name)) for name, value in vars(self).items()})

    def holds(self, other: Capacity) -> bool:
        """Return whether no field of the other is larger."""
        return self.union(other) == self

    def with_reserve(self) -> Capacity:
        """Return this with a number of tokens at the next power of two, so that ranks rarely grow again."""
        return replace(self, max_tokens_per_rank=1 << (self.max_tokens_per_rank - 1).bit_length())

    @property
    def max_row_bytes(self) -> int:
        """Maximum bytes of a row: a token, or the gradients of its weights, which are a row of num_topk values."""
        return max(self.max_bytes_per_token, 8 * self.num_topk)


@dataclass(frozen=True)
class EngineConfig:
    """Configuration of an engine, equal on all ranks; ``rank_links`` as in ``fusco.planner.rank_lanes``."""

    topology: Topology
    capacity: Capacity
    settings: Settings
    rank_links: RankLinks | None = None

    @classmethod
    def of(cls: type[_Config], config: EngineConfig) -> _Config:
        """Return the layout, a subclass, of a configuration."""
        return cls(config.topology, config.capacity, config.settings, config.rank_links)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Launch options of a call. They may differ between ranks. On the CPU they have no effect.

    Two micro-batches, each of whose experts overlap with communication of the other::

        first, second = (comm.dispatch(x, ids, weights, launch=Launch(own_stream=True)) for x, ids, weights in batches)
        events = torch.cuda.Event(), torch.cuda.Event()
        first.wait()  # for the first dispatch only: the second overlaps with the experts
        y = experts(first.rows, first.num_rows_per_expert)
        first_out = comm.combine(y, first.handle, launch=Launch(own_stream=True, event=events[0]))
        second.wait()
        y = experts(second.rows, second.num_rows_per_expert)  # overlaps with the first combine
        second_out = comm.combine(y, second.handle, launch=Launch(own_stream=True, event=events[1]))
        events[0].wait()  # the current stream may read first_out now
        events[1].wait()

    Attributes:
        num_sms: maximum number of SMs that a kernel uses; ``None`` means a default for the call.
        own_stream: run on the communicator's stream instead of the caller's current one. The call waits for the
            caller's stream first. A stream that reads the result must wait for the call: with ``Dispatched.wait``,
            with ``event``, or with ``Communicator.wait``, which waits for every call launched so far.
        event: recorded on the stream of the call, after its last kernel. ``event.wait()`` makes the current stream
            wait for the call alone. Calls that overlap need an event each. Results belong to the stream that is current
            at the call; for a result that another stream reads, call ``record_stream``, as everywhere in PyTorch. In a
            CUDA graph, wait within the capture, or pass ``torch.cuda.Event(external=True)``.

    Raises:
        TypeError, ValueError: for a value of another type, or out of range.
    """

    num_sms: int | None = None
    own_stream: bool = False
    event: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        if self.num_sms is not None:
            check_integer("num_sms", self.num_sms, least=1)
        if self.event is not None and not isinstance(self.event, torch.cuda.Event):
            raise TypeError(f"event must be a torch.cuda.Event, got {self.event!r}")

    def on_callers_stream(self) -> Launch:
        """Return the launch of the backward pass: on the caller's stream, as autograd reads gradients at once."""
        return replace(self, own_stream=False, event=None)


@dataclass(frozen=True)
class StaticRows:
    """An output of fixed size for any routing, so that the host does not wait for its size.

    ``StaticRows(num_rows)`` gives rows ``(num_rows, ...)``: the experts' blocks, one after the other. With
    ``StaticRows(rows_per_expert=c)`` they are ``(num_local_experts, c, ...)``, the layout that masked grouped matrix
    products read: row ``j`` of local expert ``e`` is ``rows[e, j]`` for ``j < num_rows_per_expert[e]``. Give one of the
    two; ranks may differ in them. ``for_rank_load`` and ``for_expert_load`` choose a size.

    Attributes:
        num_rows: rows of the output, including padding. Rows after the last block are uninitialised, and so is their
            gradient: experts must use ``num_rows_per_expert``.
        on_overflow: with ``"raise"`` the next synchronisation raises ``RowOverflowError`` if a routing needs more;
            with ``"drop"`` rows that do not fit are dropped without an error: those of the last experts, or the last
            ones of each expert with ``rows_per_expert``. ``Dispatched.num_dropped_per_expert`` counts them either way,
            and ``combine`` adds nothing for them.
        max_rows_to_node: rows of the messages that this rank sends between nodes on CUDA, to each other node; they are
            sent whether tokens fill them or not. ``None`` means a row for each of its tokens, which is always enough.
            Of more tokens for a node, the last ones do not go there: an overflow as above, but one that the node does
            not count. Elsewhere it has no effect, as messages have the size of what they carry.
        rows_per_expert: rows of each local expert, filled in order of (source rank, token, k); a multiple of the
            dispatch's ``expert_alignment``. Rows behind an expert's last one are uninitialised, and so is their
            gradient, but for those up to a multiple of ``expert_alignment``, which are zero: with
            ``expert_alignment=c`` all are.

    Raises:
        TypeError, ValueError: for a value of another type, or out of range.
    """

    num_rows: int | None = None
    on_overflow: Literal["raise", "drop"] = "raise"
    max_rows_to_node: int | None = None
    rows_per_expert: int | None = None

    def __post_init__(self) -> None:
        if (self.num_rows is None) == (self.rows_per_expert is None):
            raise ValueError(
                f"StaticRows takes either num_rows or rows_per_expert, got num_rows={self.num_rows} and "
                f"rows_per_expert={self.rows_per_expert}"
            )
        for name in ("num_rows", "max_rows_to_node", "rows_per_expert"):
            if (value := getattr(self, name)) is not None:
                check_integer(name, value, least=1, most=MAX_INT32)  # as kernels count
        if self.on_overflow not in ("raise", "drop"):
            raise ValueError(f"on_overflow must be 'raise' or 'drop', got {self.on_overflow!r}")

    @classmethod
    def for_rank_load(cls, sizes: RoutingSizes, skew: float | None = None, expert_alignment: int = 1) -> StaticRows:
        """Return the ``num_rows`` of a rank that gets ``skew`` times the rows of the average rank.

        That is ``ceil(skew * T * K)``, since R ranks with T tokens of K experts each have ``T * K`` rows per rank on
        average, but at most ``R * T * min(K, E / R)``, all that a rank can get; and ``expert_alignment - 1`` rows of
        padding for each of its ``E / R`` blocks, rounded down to a multiple of the alignment, as blocks are.

        Args:
            sizes: sizes of the routing.
            skew: rows of the busiest rank over the mean of all ranks; ``None`` means any, so that nothing overflows.
            expert_alignment: as in ``dispatch``.

        256 experts on 8 ranks, and 128 tokens of 8 experts on each; then with twice the mean for the busiest rank:

        >>> sizes = RoutingSizes(max_tokens_per_rank=128, world_size=8, num_topk=8, num_experts=256)
        >>> StaticRows.for_rank_load(sizes).num_rows, StaticRows.for_rank_load(sizes, skew=2.0).num_rows
        (8192, 2048)
        """
        return cls(sizes.rows_of_rank(skew, expert_alignment))

    @classmethod
    def for_expert_load(cls, sizes: RoutingSizes, skew: float | None = None, expert_alignment: int = 1) -> StaticRows:
        """Return the ``rows_per_expert`` of an expert that gets ``skew`` times the rows of the average expert.

        That is ``ceil(skew * R * T * K / E)``, but at most ``R * T``, a row of each token, rounded up to a multiple of
        the alignment.

        Args:
            sizes: sizes of the routing.
            skew: rows of the busiest expert over the mean of all experts; ``None`` means any, so that nothing
                overflows.
            expert_alignment: as in ``dispatch``; or what the product's tiles need, such as 128.

        >>> sizes = RoutingSizes(max_tokens_per_rank=128, world_size=8, num_topk=8, num_experts=256)
        >>> [StaticRows.for_expert_load(sizes, skew).rows_per_expert for skew in (None, 1.0, 3.5)]
        [1024, 32, 112]
        >>> StaticRows.for_expert_load(sizes, skew=3.5, expert_alignment=64).rows_per_expert
        128
        """
        return cls(rows_per_expert=sizes.rows_of_expert(skew, expert_alignment))

    @property
    def limit(self) -> int:
        """Rows that the output has, or that each expert has: what ``Dispatched.num_rows_needed`` is compared with."""
        limit = self.num_rows if self.rows_per_expert is None else self.rows_per_expert
        assert limit is not None
        return limit

    def num_slots(self, num_local_experts: int) -> int:
        """Return the rows of the output on a rank with this number of experts, all of them together."""
        return self.limit if self.rows_per_expert is None else self.limit * num_local_experts


@dataclass(frozen=True, kw_only=True)
class RoutingSizes:
    """Sizes of a routing, from which ``StaticRows`` are chosen. The experts of a token are assumed to differ.

    Attributes:
        max_tokens_per_rank: T, the maximum number of tokens of a rank.
        world_size: R, the number of ranks.
        num_topk: K, experts per token.
        num_experts: E, experts of all ranks together, the same number on each; of a placement with copies, its places.

    Raises:
        TypeError, ValueError: for a value of another type, or out of range.
    """

    max_tokens_per_rank: int
    world_size: int
    num_topk: int
    num_experts: int

    def __post_init__(self) -> None:
        for name in ("max_tokens_per_rank", "world_size", "num_topk", "num_experts"):
            check_integer(name, getattr(self, name), least=1)
        if self.num_experts % self.world_size:
            raise ValueError(
                f"{self.num_experts} experts are not the same number on each of {self.world_size} ranks: pass the "
                f"largest number of a rank times the ranks"
            )

    @property
    def _num_tokens(self) -> int:
        return self.world_size * self.max_tokens_per_rank

    def rows_of_rank(self, skew: float | None, expert_alignment: int) -> int:
        """Return the rows of a busy rank; see ``StaticRows.for_rank_load``."""
        num_local = self.num_experts // self.world_size
        most = self._num_tokens * min(self.num_topk, num_local)
        num_rows = _skewed(self._num_tokens * self.num_topk, self.world_size, skew, most)
        check_integer("expert_alignment", expert_alignment, least=1)
        padded = num_rows + min(num_rows, num_local) * (expert_alignment - 1)
        return padded // expert_alignment * expert_alignment

    def rows_of_expert(self, skew: float | None, expert_alignment: int) -> int:
        """Return the rows of a busy expert; see ``StaticRows.for_expert_load``."""
        num_rows = _skewed(self._num_tokens * self.num_topk, self.num_experts, skew, self._num_tokens)
        check_integer("expert_alignment", expert_alignment, least=1)
        return -(-num_rows // expert_alignment) * expert_alignment


def _skewed(num_pairs: int, num_parts: int, skew: float | None, most: int) -> int:
    """Return the rows of a part with ``skew`` times the mean, at most ``most``; those for ``None``."""
    if skew is None:
        return most
    if not isinstance(skew, (int, float)) or isinstance(skew, bool):
        raise TypeError(f"skew must be a number, got {skew!r}")
    if not 1.0 <= skew < math.inf:
        raise ValueError(f"skew must be at least 1, the load of the busiest over the mean, got {skew}")
    return min(most, math.ceil(skew * num_pairs / num_parts))
