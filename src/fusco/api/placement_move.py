"""A move between two placements at one rank: its experts as bytes, where they are read, and how they are put down."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from fusco.control.fingerprint import Fields
from fusco.core.lanes import IntArray
from fusco.core.rows import as_bytes, count_as_changed, describe_rows, row_bytes
from fusco.core.topology import Topology
from fusco.placement.moves import MovePlan, Placement, as_places, plan_moves

_LONGEST_TEXT = 300  # of the tensors in a fingerprint, whose room is limited


@dataclass(frozen=True, eq=False, kw_only=True)
class PlacementMove:
    """Sources and targets of a rank, which are the same memory in a move in place, and the plan of all ranks."""

    rank: int
    old: IntArray  # (R, P), the expert in each place
    new: IntArray  # (R, P)
    plan: MovePlan
    sources: ExpertMemory
    targets: ExpertMemory
    is_in_place: bool
    loaded: Mapping[int, Sequence[torch.Tensor]]  # bytes of this rank's new experts that no rank had

    @classmethod
    def of(
        cls,
        placements: tuple[Placement, Placement],
        topology: Topology,
        rank: int,
        weights: Sequence[torch.Tensor] | None,
        targets: Sequence[torch.Tensor] | None,
        load: Callable[[int], Sequence[torch.Tensor]] | None = None,
    ) -> PlacementMove:
        """Plan a move; raises as ``plan_moves``, and ``ValueError`` if weights and targets do not go together.

        ``placements`` are old and new. ``None`` for weights or targets means the others; not both. ``load`` returns the
        tensors of an expert that is on no rank in ``old``.
        """
        given = [
            _sequence(name, each) for name, each in (("weights", weights), ("targets", targets)) if each is not None
        ]
        if not given:
            raise ValueError("move_experts needs weights, or targets on a rank that has no experts yet; got neither")
        sources, into = ExpertMemory(given[0]), ExpertMemory(given[-1])
        if (from_ := describe_experts(given[0])) != (to := describe_experts(given[-1])):
            raise ValueError(f"weights are {from_} for each expert, targets {to}")
        old, new = as_places(placements[0], "old"), as_places(placements[1], "new")
        lost = np.setdiff1d(new[new >= 0], old) if load else np.zeros(0, np.int64)
        sent = np.where(np.isin(new, lost), -1, new) if len(lost) else new
        plan = plan_moves(old, sent, sources.bytes_per_expert, topology)
        here = np.intersect1d(new[rank], lost).tolist() if load else []
        loaded = {expert: _bytes_of(expert, load(expert), given[-1]) for expert in here} if load else {}
        if weights is None and (old[rank] >= 0).any():
            raise ValueError(f"rank {rank} has experts {old[rank].tolist()} in old, but no weights")
        return cls(
            rank=rank,
            old=old,
            new=new,
            plan=plan,
            sources=sources,
            targets=into,
            is_in_place=targets is None,
            loaded=loaded,
        )

    @property
    def fields(self) -> Fields:
        """What must be equal on all ranks."""
        return {
            "old": describe_places(self.old),
            "new": describe_places(self.new),
            "experts": describe_experts(self.sources.tensors),
        }

    def num_places(self, places: IntArray) -> int:
        """Return how many places this rank's tensors must have for a placement."""
        return int(np.flatnonzero(places[self.rank] >= 0).max(initial=-1)) + 1

    def read(self, i: int, begin: int, end: int) -> Iterator[torch.Tensor]:
        """Yield bytes of the expert of transfer ``i``, which this rank has."""
        return self.sources.pieces(self._old_place[int(self.plan.experts[i])], begin, end)

    def put(self, arrived: Mapping[int, Sequence[torch.Tensor]], num_there: Mapping[int, int]) -> None:
        """Write all new experts to their places: those that have arrived, by transfer, and those that were here.

        ``num_there`` has, by expert, how many of the first bytes are in their place already.
        """
        pieces = {**self.loaded, **{int(self.plan.experts[i]): of for i, of in arrived.items()}}
        old, num_bytes = self.old[self.rank], self.sources.bytes_per_expert
        written = [
            (place, expert)
            for place, expert in enumerate(self.new[self.rank].tolist())
            if expert >= 0 and not (self.is_in_place and place < len(old) and old[place] == expert)
        ]
        with torch.inference_mode():  # in which inference tensors may be changed, too
            for expert in {expert for _, expert in written} - pieces.keys():
                here = self.sources.pieces(self._old_place[expert], 0, num_bytes)
                pieces[expert] = [piece.clone() for piece in here] if self._are_shared else [*here]
            for place, expert in written:
                self.targets.write(place, pieces[expert], num_there.get(expert, 0))
        if written:
            self.targets.count_as_changed()

    @cached_property
    def _are_shared(self) -> bool:
        """True if sources may be overwritten while new experts are put into their places."""
        ends = (self.sources, self.targets)
        from_, to = ({tensor.untyped_storage().data_ptr() for tensor in end.tensors} for end in ends)
        return bool(from_ & to)

    @cached_property
    def _old_place(self) -> dict[int, int]:
        places = enumerate(self.old[self.rank].tolist())
        return {expert: place for place, expert in reversed([*places]) if expert >= 0}


def _bytes_of(expert: int, tensors: object, places: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the bytes of an expert that has been loaded; ``ValueError`` unless it is as those in ``places``."""
    loaded = _sequence(f"the tensors of expert {expert}", tensors) if isinstance(tensors, Sequence) else []
    expected, found = describe_experts(places), describe_experts([each[None] for each in loaded])
    if found != expected:
        raise ValueError(f"load({expert}) returned {found or tensors!r}, experts here are {expected}")
    return [as_bytes(each.to(place.device).contiguous()).flatten() for each, place in zip(loaded, places, strict=True)]


def _sequence(name: str, tensors: object) -> Sequence[torch.Tensor]:
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        raise TypeError(f"{name} must be a sequence of tensors, got {type(tensors).__name__}")
    if wrong := next((each for each in tensors if not isinstance(each, torch.Tensor) or not each.ndim), None):
        raise TypeError(f"{name} must be tensors (places, ...), got {wrong!r}")
    return tensors


def describe_experts(tensors: Sequence[torch.Tensor]) -> str:
    """Return dtypes and shapes of the weights of one expert, as text; many of them as their number and a hash.

    >>> describe_experts([torch.empty(4, 3, 2), torch.empty(4, dtype=torch.uint8)])
    'float32[3, 2], uint8[]'
    """
    text = ", ".join(map(describe_rows, tensors))
    return text if len(text) <= _LONGEST_TEXT else f"{len(tensors)} tensors ({_digest(text.encode())})"


def describe_places(places: IntArray) -> str:
    """Return a text that differs between placements: ranks, places of each, a hash."""
    num_ranks, num_places = places.shape
    return f"{num_ranks} x {num_places} places ({_digest(places.tobytes())})"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


class ExpertMemory:
    """The places of a rank: tensors (P, ...), whose rows ``[i]`` are together the bytes of the expert in place ``i``.

    A row is contiguous; rows need not follow each other.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)
        ends = np.cumsum([row_bytes(tensor) for tensor in tensors], dtype=np.int64)
        self._spans = list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=False))
        self.bytes_per_expert = int(ends[-1]) if len(ends) else 0

    def pieces(self, place: int, begin: int, end: int) -> Iterator[torch.Tensor]:
        """Yield views of bytes ``begin`` to ``end`` of the expert in a place, in order, uint8."""
        for tensor, (first, last) in zip(self.tensors, self._spans, strict=True):
            if begin < last and first < end:
                yield as_bytes(tensor[place])[max(begin - first, 0) : end - first]

    def write(self, place: int, pieces: Sequence[torch.Tensor], begin: int = 0) -> None:
        """Write the bytes of an expert, in order, to a place; from byte ``begin`` on."""
        first = 0
        for piece in pieces:
            rest, end = piece[max(begin - first, 0) :], first + len(piece)
            for target in self.pieces(place, max(begin, first), end):
                target.copy_(rest[: len(target)])
                rest = rest[len(target) :]
            first = end

    def count_as_changed(self) -> None:
        """Count a change in place of all tensors."""
        for tensor in self.tensors:
            count_as_changed(tensor)
