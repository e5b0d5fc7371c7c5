"""Ranks on a testbed, forked from a process that has imported what they need: each new interpreter takes seconds."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from unittest import mock

from fusco.bench.ranks.local_world import PRELOADED
from fusco.testbed import Namespaces, Testbed
from fusco.testbed.testbed import rank_environment

# What is read when a process begins. Memory of results is used again: pages that are mapped anew in every call would
# keep the cores busy.
_FIRST = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


class ForkedRank:
    """A process that runs ``main`` of a module of these tests on a host, with what it prints."""

    def __init__(
        self, namespaces: Namespaces, environment: Mapping[str, str], module: str, arguments: Sequence[str]
    ) -> None:
        """``environment`` is added to this process's. The module's ``sys.argv`` has the arguments."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED, "compiled_kernels"])
        with mock.patch.dict(os.environ, {**_FIRST, "PYTHONPATH": os.pathsep.join(sys.path)}):
            forkserver.ensure_running()
        output, printed = context.Pipe(duplex=False)
        what = (namespaces, {**os.environ, **environment}, [module, *arguments], printed)
        self._process = context.Process(target=_run, args=what, daemon=True)
        self._process.start()
        printed.close()
        self.stdout = os.fdopen(os.dup(output.fileno()))
        output.close()

    def ended(self, limit_s: float) -> int | None:
        """Wait for its end; return its exit code, or ``None`` if it has not ended."""
        self._process.join(limit_s)
        return self._process.exitcode


def fork_ranks(bed: Testbed, module: str, *arguments: str) -> list[ForkedRank]:
    """Start all ranks of a testbed."""
    hosts, of_each = range(bed.layout.num_hosts), range(bed.layout.ranks_per_host)
    places = [(host, local_rank) for host in hosts for local_rank in of_each]
    return [ForkedRank(bed.namespaces(*place), rank_environment(bed, *place), module, arguments) for place in places]


def _run(namespaces: Namespaces, environment: dict[str, str], command: list[str], printed: Connection) -> None:
    os.dup2(printed.fileno(), sys.stdout.fileno())
    namespaces.enter()
    os.environ.update(environment)
    sys.argv = command
    importlib.import_module(command[0]).main()
    sys.stdout.flush()
