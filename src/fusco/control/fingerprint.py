"""What every rank tells every other at the start of a collective, and the check that they agree."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from fusco.control.layout import RECORD_TEXT_BYTES
from fusco.core.errors import MismatchError, RejectedInputError

Fields: TypeAlias = Mapping[str, int | float | str | list[str]]


@dataclass(frozen=True)
class CollectiveFingerprint:
    """What all ranks must agree on in one collective.

    ``fields`` are named values that must be equal everywhere. ``rejection`` says why this rank's input was refused,
    ``""`` if it was not; its fields do not count then.
    """

    operation: str
    fields: Fields = field(default_factory=dict)
    rejection: str = ""

    def encode(self) -> bytes:
        """As JSON text."""
        rejection = self.rejection
        while len(text := self._to_json(rejection)) > RECORD_TEXT_BYTES and rejection:
            rejection = rejection[: len(rejection) * 3 // 4]  # an error may quote anything at any length
        return text

    def _to_json(self, rejection: str) -> bytes:
        return json.dumps({"operation": self.operation, "fields": self.fields, "rejection": rejection}).encode()

    @classmethod
    def decode(cls, text: bytes) -> CollectiveFingerprint:
        """From JSON text."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Record:
    """A fingerprint and the counts that a rank publishes with it."""

    fingerprint: CollectiveFingerprint
    counts: tuple[int, ...]


def check_fingerprints(fingerprints: Sequence[CollectiveFingerprint], rank: int) -> None:
    """Raise, the same on all ranks, unless ``fingerprints[r]`` of all ranks go together.

    A rank with a rejection of its own does not raise; its caller has the original error.

    >>> two = [CollectiveFingerprint("dispatch", {"num_topk": 8}), CollectiveFingerprint("dispatch", {"num_topk": 4})]
    >>> check_fingerprints(two, rank=0)
    Traceback (most recent call last):
    fusco.core.errors.MismatchError: ranks disagree in dispatch: num_topk is 8 on rank 0, 4 on rank 1
    """
    own = fingerprints[rank]
    if not own.rejection and all(other is own or other == own for other in fingerprints):
        return
    operations = _group_by([fingerprint.operation for fingerprint in fingerprints])
    if len(operations) > 1:
        raise MismatchError(f"ranks call different collectives: {_listing(operations)}")
    operation = own.operation

    if own.rejection:
        return
    rejections = [f"rank {r} rejected its input: {f.rejection}" for r, f in enumerate(fingerprints) if f.rejection]
    if rejections:
        raise RejectedInputError(f"{operation} was called off on all ranks, since {'; '.join(rejections)}")

    names = dict.fromkeys(name for fingerprint in fingerprints for name in fingerprint.fields)
    by_field = {
        name: _group_by([fingerprint.fields.get(name, "not given") for fingerprint in fingerprints]) for name in names
    }
    differing = [f"{name} is {_listing(groups)}" for name, groups in by_field.items() if len(groups) > 1]
    if differing:
        raise MismatchError(f"ranks disagree in {operation}: {'; '.join(differing)}")


def _group_by(values: Sequence[object]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(str(value), []).append(rank)
    return groups


def _listing(groups: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(
        f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for value, ranks in groups.items()
    )
