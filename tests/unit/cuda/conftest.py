"""Fixtures of the tests of repeated calls, and of those on emulated kernels."""

from __future__ import annotations

import hashlib
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import emulator
import pytest

from fusco.cuda.kernels import plan as plan_kernel
from fusco.cuda.kernels.compiler import SOURCE_DIR
from repeats import noted_repeats


@pytest.fixture
def repeated_operations():
    """Names of the calls that were repeated."""
    with noted_repeats() as operations:
        yield operations


@pytest.fixture
def repeats(repeated_operations):
    """Number of dispatches and combines that were repeated."""
    count = repeated_operations.count
    return lambda: (count("dispatch"), count("combine") + count("combine_all"))


@pytest.fixture
def repeats_along_plans(repeated_operations):
    """Number of dispatches along a handle that were repeated."""
    return lambda: repeated_operations.count("dispatch_again")


@pytest.fixture
def no_bound(request):
    """Without an output of the maximum size, if the test asks for that."""
    with ExitStack() as stack:
        if request.param:
            for name in ("within_node.shuffle", "between_nodes.shuffle"):
                stack.enter_context(mock.patch(f"fusco.cuda.{name}.affordable_bound_of", return_value=None))
        yield


@pytest.fixture(scope="session")
def folder(request, tmp_path_factory):
    """Folder of what tests compile, the same for all workers, and kept by pytest for runs of the same sources."""
    if not (cache := getattr(request.config, "cache", None)):  # -p no:cacheprovider
        base = tmp_path_factory.getbasetemp()
        return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    sources = (
        each for at in (SOURCE_DIR, emulator.EMULATION_DIR, Path(emulator.__file__)) for each in (at, *at.glob("*"))
    )
    digest = hashlib.sha256(b"".join(each.read_bytes() for each in sorted(sources) if each.is_file())).hexdigest()[:16]
    kept = cache.mkdir("compiled") / digest
    for other in kept.parent.iterdir():  # of sources that are no more
        if other != kept:
            shutil.rmtree(other, ignore_errors=True)
    return kept


@pytest.fixture
def as_many_blocks_as_for_many_tokens(monkeypatch):
    monkeypatch.setattr(plan_kernel, "plan_shape", lambda num_pairs: (512, -(-num_pairs // 8)))
