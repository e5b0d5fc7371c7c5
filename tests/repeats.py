"""Which calls are repeated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from fusco.control.session import Session


@contextmanager
def noted_repeats() -> Iterator[list[str]]:
    """Note the names of the calls that are repeated in the block."""
    operations: list[str] = []
    repeat = Session.repeat

    def noted(session, operation, *arguments):
        is_repeated = repeat(session, operation, *arguments)
        operations.extend([operation] * is_repeated)
        return is_repeated

    with mock.patch.object(Session, "repeat", noted):
        yield operations
