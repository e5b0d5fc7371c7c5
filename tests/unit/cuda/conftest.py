"""Fixtures of the tests of repeated calls, and of those on emulated kernels."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest

from fusco.cuda.kernels import plan as plan_kernel
from fusco.cuda.repeated.between_nodes import RepeatedInternodeCombine, RepeatedInternodeDispatch
from fusco.cuda.repeated.within_node import RepeatedCombine, RepeatedDispatch, RepeatedRedispatch


@pytest.fixture
def repeats():
    """Number of dispatches and combines that were repeated."""
    dispatches, combines = (RepeatedDispatch, RepeatedInternodeDispatch), (RepeatedCombine, RepeatedInternodeCombine)
    with _counted(dispatches) as num_dispatches, _counted(combines) as num_combines:
        yield lambda: (num_dispatches(), num_combines())


@pytest.fixture
def repeats_along_plans():
    """Number of dispatches along a handle that were repeated."""
    with _counted([RepeatedRedispatch]) as num_redispatches:
        yield num_redispatches


@contextmanager
def _counted(kinds):
    with ExitStack() as stack:
        runs = [stack.enter_context(mock.patch.object(of, "run", autospec=True, side_effect=of.run)) for of in kinds]
        yield lambda: sum(run.call_count for run in runs)


@pytest.fixture
def no_bound(request):
    """Without an output of the maximum size, if the test asks for that."""
    with ExitStack() as stack:
        if request.param:
            for name in ("within_node.shuffle", "repeated.within_node", "between_nodes.shuffle"):
                stack.enter_context(mock.patch(f"fusco.cuda.{name}.affordable_bound_of", return_value=None))
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Folder of compiled emulated kernels, the same for all workers of a run."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulated"


@pytest.fixture
def as_many_blocks_as_for_many_tokens(monkeypatch):
    monkeypatch.setattr(plan_kernel, "plan_shape", lambda num_pairs: (512, -(-num_pairs // 8)))
