"""Fingerprints that ranks exchange at the start of a collective, and the check that they agree."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from fusco.control.layout import RECORD_TEXT_BYTES
from fusco.core.errors import GrowthError, MismatchError, RejectedInputError

REJECTION = "rejection"  # operation of a rank that takes part only to say that it cannot, whatever the others call
GROWTH = "larger dispatch"  # operation of a rank whose dispatch the communicator has no room for

Fields: TypeAlias = Mapping[str, int | float | str | list[str]]


@dataclass(frozen=True)
class CollectiveFingerprint:
    """Values that must be equal on all ranks in one collective.

    ``fields`` maps names to these values. ``rejection`` is the reason why this rank's input was rejected, ``""`` if it
    was accepted. The fields of a rank with a rejection are ignored.
    """

    operation: str
    fields: Fields = field(default_factory=dict)
    rejection: str = ""

    @cached_property
    def text(self) -> bytes:
        """The fingerprint as JSON, at most ``RECORD_TEXT_BYTES`` bytes; a long rejection is cut."""
        rejection = self.rejection
        while len(text := self._to_json(rejection)) > RECORD_TEXT_BYTES and rejection:
            rejection = rejection[: len(rejection) * 3 // 4]  # an error may quote input of any length
        return text

    def _to_json(self, rejection: str) -> bytes:
        return json.dumps({"operation": self.operation, "fields": self.fields, "rejection": rejection}).encode()

    @cached_property
    def digest(self) -> tuple[int, int]:
        """Hash of the text as two int64: equal fingerprints have equal digests, different ones do not in practice."""
        first, second = struct.unpack("2q", hashlib.blake2b(self.text, digest_size=16).digest())
        return first, second

    @classmethod
    def decode(cls, text: bytes, handle: int = 0) -> CollectiveFingerprint:
        """Parse a ``text``; a handle, by its number, becomes another field."""
        fingerprint = cls(**json.loads(text))
        return replace(fingerprint, fields={**fingerprint.fields, "handle": handle}) if handle else fingerprint


def check_fingerprints(
    fingerprints: Sequence[CollectiveFingerprint], rank: int, numbers: Sequence[int] | None = None
) -> None:
    """Raise, the same on all ranks, unless the fingerprints of all ranks (``fingerprints[r]``) are equal.

    Errors name rank ``r`` as ``numbers[r]``, by default as ``r``. A rank that rejected its own input does not raise;
    its caller has the original error.

    Raises:
        MismatchError: if ranks are in different collectives, or fields differ.
        RejectedInputError: if other ranks rejected their input.
        GrowthError: if all ranks dispatch, and some have no room for it.

    >>> two = [CollectiveFingerprint("dispatch", {"num_topk": 8}), CollectiveFingerprint("dispatch", {"num_topk": 4})]
    >>> check_fingerprints(two, rank=0)
    Traceback (most recent call last):
    fusco.core.errors.MismatchError: ranks disagree in dispatch: num_topk is 8 on rank 0, 4 on rank 1
    """
    local = fingerprints[rank]
    if not local.rejection and all(other is local or other == local for other in fingerprints):
        return
    operations = _group_by([fingerprint.operation for fingerprint in fingerprints], numbers)
    if len(operations) > 1 and REJECTION not in operations and operations.keys() != {"dispatch", GROWTH}:
        raise MismatchError(f"ranks call different collectives: {_listing(operations)}")
    operation = local.operation

    if local.rejection:
        return
    by_number = zip(numbers or range(len(fingerprints)), fingerprints, strict=True)
    rejections = [f"rank {r} rejected its input: {f.rejection}" for r, f in by_number if f.rejection]
    if rejections:
        raise RejectedInputError(f"{operation} was cancelled on all ranks, since {'; '.join(rejections)}")
    if GROWTH in operations:
        raise GrowthError(f"the communicator has no room for the {_listing({GROWTH: operations[GROWTH]})}")

    names = dict.fromkeys(name for fingerprint in fingerprints for name in fingerprint.fields)
    by_field = {
        name: _group_by([fingerprint.fields.get(name, "not given") for fingerprint in fingerprints], numbers)
        for name in names
    }
    differing = [f"{name} is {_listing(groups)}" for name, groups in by_field.items() if len(groups) > 1]
    if differing:
        raise MismatchError(f"ranks disagree in {operation}: {'; '.join(differing)}")


def _group_by(values: Sequence[object], numbers: Sequence[int] | None) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, value in zip(numbers or range(len(values)), values, strict=True):
        groups.setdefault(str(value), []).append(rank)
    return groups


def _listing(groups: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(
        f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for value, ranks in groups.items()
    )
