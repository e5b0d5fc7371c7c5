"""Run a benchmark on ranks: processes of this machine, or the job that a launcher has started."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from fusco.bench.names import STDOUT
from fusco.bench.ranks.emulation import emulated_network
from fusco.cli.wording import plural
from fusco.core.environment import may_share_gpus
from fusco.core.memory_size import available_memory_bytes
from fusco.core.topology import Topology

if TYPE_CHECKING:
    from fusco.bench.harness.model_job import ModelJob
    from fusco.bench.ranks.torchrun import Launched

_Result = TypeVar("_Result")


Prepare = Callable[[Callable[[int, int], object]], object]
_LOG_WIDTH = 150  # columns of a table in a log
_LINE_S = 10.0  # between lines on progress in a log


class Interrupted(BaseException):
    """Ctrl-C, with a remark; not KeyboardInterrupt, which typer handles itself, some versions with exit code 1."""


class Terminated(Interrupted):
    """SIGTERM."""


def new_console(json: Path | None = None) -> Console:
    """Return the console for tables: stdout, or stderr if JSON lines go to stdout.

    It has the width of the terminal or of ``COLUMNS``; without either, or if that is 0, that of the widest table.
    """
    is_stderr = json == STDOUT
    console = Console(stderr=is_stderr)
    if console.width and (console.is_terminal or os.environ.get("COLUMNS", "").isdecimal()):
        return console
    return Console(stderr=is_stderr, width=max(console.width, _LOG_WIDTH))


def tell_written(console: Console, *files: Path) -> None:
    """Print which file was written, or from which to which, and the size of all."""
    size = sum(file.stat().st_size for file in files)
    amount = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
    line = f"wrote {' to '.join(map(str, dict.fromkeys((files[0], files[-1]))))}, {amount}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


class StepProgress(Progress):
    """A bar, steps, times passed and left, and below them the description of the latest step, which wraps, uncut."""

    def __init__(self, console: Console) -> None:
        # Stdout is not the console's: rank 0 of a launched job may write JSON lines there.
        columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), "left")
        super().__init__(*columns, console=console, transient=True, redirect_stdout=False)

    @contextmanager
    def lines_in_logs(self) -> Iterator[None]:
        """Print a line on the task every ten seconds, on stderr, if there is no terminal to show a bar on."""
        ended, begin = threading.Event(), time.monotonic()

        def tell() -> None:
            while not ended.wait(_LINE_S):
                for task in self.tasks:
                    steps = f", {task.completed:.0f} of {task.total:.0f}" if task.total else ""
                    sys.stderr.write(f"fusco: {task.description}{steps}, after {time.monotonic() - begin:.0f} s\n")
                    sys.stderr.flush()

        thread = threading.Thread(target=tell, daemon=True)
        if not self.console.is_terminal:
            thread.start()
        try:
            yield
        finally:
            ended.set()

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield what is shown."""
        yield from super().get_renderables()
        yield from (Text(task.description) for task in self.tasks)


def absolute(path: Path | None) -> Path | None:
    """Return the path of a file of JSON lines for ranks, whose working directory may differ."""
    return path.resolve() if path and path != STDOUT else path


def num_devices(device: str) -> int:
    """Return the number of GPUs of this machine, 0 on the CPU; ``ValueError`` for ``"cuda"`` without a GPU."""
    if device != "cuda":
        return 0
    import torch

    if not (found := torch.cuda.device_count()):
        raise ValueError("--device cuda needs a GPU, and torch finds none")
    return found


def choose_shape(
    device: str, nodes: int | None, ranks_per_node: int | None, launched: Launched | None, num_devices: int
) -> tuple[int, int]:
    """Return the number of nodes and ranks per node: as given, else as launched, else what this machine has.

    Raises ``ValueError`` if they do not divide, if there are too few GPUs, or if a launcher started another number.
    """
    if launched:
        ranks_per_node = ranks_per_node or launched.local_world_size
        nodes = nodes or max(1, launched.world_size // ranks_per_node)
        if nodes * ranks_per_node != launched.world_size:
            raise ValueError(
                f"{launched.world_size} ranks were launched, {launched.local_world_size} on this machine, which are "
                f"not {nodes} nodes of {ranks_per_node}"
            )
        return nodes, ranks_per_node
    if device != "cuda":
        return nodes or 2, ranks_per_node or 2
    nodes = nodes or 1
    if ranks_per_node is None:
        if num_devices % nodes:
            raise ValueError(f"{num_devices} GPUs do not divide among {nodes} nodes; pass --ranks-per-node")
        ranks_per_node = max(1, num_devices // nodes)
    if nodes * ranks_per_node > num_devices and not may_share_gpus():
        raise ValueError(f"{nodes * ranks_per_node} ranks need a GPU each, but torch finds {num_devices}")
    return nodes, ranks_per_node


def check_room(what: str, bytes_per_rank: int, num_ranks: int) -> None:
    """Raise ``ValueError`` if the ranks on this machine (all, or those that a launcher started here) need too much.

    ``what`` names the memory, with the options that make it smaller; ``bytes_per_rank`` is a lower bound of it.
    """
    from fusco.bench.ranks.torchrun import launched

    job = launched()
    num_local = job.local_world_size if job else num_ranks
    needed, free = bytes_per_rank * num_local, available_memory_bytes()
    if needed > free:
        raise ValueError(
            f"{what} need {needed:,} bytes on {num_local} rank{'s' if num_local > 1 else ''} of this machine, but "
            f"{free:,} are free"
        )


def run_on_ranks(
    function: Callable[..., _Result],
    arguments: Sequence[Any],
    num_ranks: int,
    console: Console,
    *,
    device: str = "cpu",
    topology: Topology | None = None,
    prepare: Sequence[Prepare] = (),
    limit_s: float = 600.0,
) -> list[_Result] | None:
    """Call ``function(group, *arguments, progress_port)`` on every rank and return the results, by rank.

    It starts ``num_ranks`` processes, unless a launcher has started the ranks; all of those but rank 0 return ``None``.
    The console shows the steps that rank 0 reports, and the note of every twentieth, if they have one.
    Where it is no terminal, a line on stderr says every ten seconds what is being done. For ranks that are started
    here, ``prepare`` compiles kernels first, so that they load them from disk, and reports its steps; ``limit_s``
    is the limit of the function, and on CUDA the nodes of a ``topology`` are emulated.
    """
    from fusco.bench.ranks.local_world import LocalWorld
    from fusco.bench.ranks.progress import new_store, watching
    from fusco.bench.ranks.torchrun import launched, run_joined

    job = launched()
    if job and job.rank:
        return run_joined(device, function, *arguments, None)
    with StepProgress(console) as progress, progress.lines_in_logs():
        task, next_note = progress.add_task("starting", total=None), 1

        def show(num_done: int, num_steps: int, note: str) -> None:
            nonlocal next_note
            if num_done:
                what = note or "verifying and measuring"
                progress.update(task, completed=num_done, total=num_steps, description=what)
            if note and num_done >= next_note:
                next_note = num_done + max(1, num_steps // 20)
                progress.console.print(note, highlight=False, soft_wrap=True)

        if job:
            store = new_store()
            with watching(store, show):
                return run_joined(device, function, *arguments, store.port)

        def compiled(num_done: int, num_steps: int) -> None:
            progress.update(task, description="compiling kernels (once)", completed=num_done, total=num_steps)

        progress.update(task, description="compiling kernels (once)" if prepare else "")
        for each in prepare:
            each(compiled)
        progress.update(task, description=f"starting {plural(num_ranks, 'rank')}", completed=0, total=None)
        environment = (
            emulated_network(topology, os.environ, num_devices(device)) if topology and device == "cuda" else None
        )
        preloaded = [function.__module__]
        with LocalWorld(num_ranks, device, environment, limit_s, None, preloaded) as world, watching(world.store, show):
            return world.run(function, num_ranks, *arguments, world.store.port)


def run_model(
    function: Callable[..., list[_Result]], job: ModelJob, room: tuple[str, int], console: Console, json: Path | None
) -> list[_Result] | None:
    """Run a rank's part of a benchmark of a model and return what rank 0 does; ``None`` on other ranks of a launcher.

    ``room`` is what a rank needs on the CPU, as for ``check_room``; ``json`` is the file that rank 0 adds results to.
    """
    from fusco.cpu.kernels.warm_up import warm_up_cpu

    if job.device == "cpu":
        check_room(*room, job.num_ranks)

    # NCCL takes ranks of a node for those of one host, but it refuses ranks of a host that share a GPU.
    per_host = 1 if job.num_ranks > num_devices(job.device) else job.ranks_per_node
    hosts = Topology.of_equal_nodes(job.num_ranks, per_host)
    where: dict[str, Any] = {"device": job.device, "topology": hosts, "prepare": (warm_up_cpu,)}
    results = run_on_ranks(function, (job, absolute(json)), job.num_ranks, console, **where)
    return results[0] if results else None
