"""Jobs of torchrun whose ranks are forked from a process that has imported what they need."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


@dataclass(frozen=True)
class Ended:
    """A job that has ended: whether each rank succeeded, and what all of them printed."""

    is_ok: bool
    stdout: str
    stderr: str


def launch(num_ranks: int, program: str, arguments: Sequence[str], logs: Path) -> Ended:
    """Run a program, a file or a module, on CPUs as ``torchrun`` does: by its agent, with its variables."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
        monitor_interval=0.05,
    )
    handled = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    try:
        elastic_launch(config, _run)(program, list(arguments))
        is_ok = True
    except ChildFailedError:
        is_ok = False
    finally:
        for each, handler in handled.items():  # the agent's stay
            signal.signal(each, handler)
    printed = ("".join(path.read_text() for path in sorted(logs.rglob(f"{name}.log"))) for name in ("stdout", "stderr"))
    return Ended(is_ok, *printed)


def _run(program: str, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.argv = [program, *arguments]
    try:
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
