"""Fixtures of the tests of repeated calls."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest

from fusco.cuda.repeated_calls import RepeatedCombine, RepeatedDispatch
from fusco.cuda.repeated_internode import RepeatedInternodeCombine, RepeatedInternodeDispatch


@pytest.fixture
def repeats():
    """Number of calls that were repeated, by kind."""
    with ExitStack() as stack:
        dispatches, combines = (
            [stack.enter_context(mock.patch.object(of, "run", autospec=True, side_effect=of.run)) for of in kinds]
            for kinds in ((RepeatedDispatch, RepeatedInternodeDispatch), (RepeatedCombine, RepeatedInternodeCombine))
        )
        yield lambda: tuple(sum(run.call_count for run in runs) for runs in (dispatches, combines))


@pytest.fixture
def no_bound(request):
    """Without an output of the maximum size, if the test asks for that."""
    with ExitStack() as stack:
        if request.param:
            for name in ("intranode", "repeated_calls", "internode"):
                stack.enter_context(mock.patch(f"fusco.cuda.{name}.affordable_bound_of", return_value=None))
        yield
