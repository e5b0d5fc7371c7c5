"""Several ranks on this machine: processes joined by gloo that run functions on request."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.resource_tracker import ensure_running
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported without saying so

from fusco.control.threads import within
from fusco.ranks.failures import RankFailedError, RankFailure
from fusco.ranks.torchrun import backends_for, choose_gpu

_P = ParamSpec("_P")
_Result = TypeVar("_Result")

# What ranks are forked with, so that each need not import it for seconds; whoever starts the first world may add to it.
PRELOADED = ["fusco.api.communicator", "fusco.ranks.local_world"]
# How long the other ranks may take to come to an end, too, once one has failed: they may wait for it without a limit.
_GRACE_S = 30.0
# How long a process may take to leave by itself: interpreters end slowly on a machine with more ranks than cores.
_LEAVING_S = 20.0


class LocalWorld:
    """``world_size`` processes, ranks of one group (gloo, and NCCL for CUDA tensors), each with one compute thread.

    With ``device="cuda"`` each rank's current device is its own, or shared in turn if there are fewer devices. The
    processes have the environment of this one, and ``environment[rank]`` on top, set before NCCL or CUDA read it.
    On the CPU they are forked from a process that has imported PyTorch and done nothing else; with CUDA, or
    ``start_method="spawn"``, they are interpreters of their own, which take longer to start, and end as a user's do.

    A function given to ``run`` is called as ``function(group, *args)`` on every rank, where ``group`` has the first
    ``num_ranks`` ranks. It must be importable, its result must pickle, and it must be done within ``limit_s`` seconds.

    Ctrl-C is for this process alone: the ranks do not hear of it. Left by an error, the world kills them.
    """

    def __init__(
        self,
        world_size: int,
        device: str = "cpu",
        environment: Sequence[Mapping[str, str]] | None = None,
        limit_s: float = 600.0,
        start_method: Literal["forkserver", "spawn"] | None = None,
    ) -> None:
        if environment is not None and len(environment) != world_size:
            raise ValueError(f"{world_size} ranks need an environment each, got {len(environment)}")
        self.world_size, self.device, self._limit_s = world_size, device, limit_s
        # The store lives here, so that it outlives any rank.
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context: Any = mp.get_context(start_method or ("spawn" if device == "cuda" else "forkserver"))
        if context.get_start_method() == "forkserver":
            context.set_forkserver_preload(PRELOADED)
        self._pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        try:
            with _deaf_to_interrupts():
                for rank in range(world_size):
                    ours, theirs = context.Pipe()
                    variables = {**os.environ, **(environment[rank] if environment else {})}
                    arguments = (rank, world_size, device, self.store.port, variables, theirs)
                    process = context.Process(target=_serve, args=arguments, name=f"rank {rank}", daemon=True)
                    process.start()
                    theirs.close()
                    self._pipes.append(ours)
                    self.processes.append(process)
        except BaseException:
            self.kill()
            raise

    def run(
        self,
        function: Callable[Concatenate[dist.ProcessGroup, _P], _Result],
        num_ranks: int,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> list[_Result]:
        """Call a function on the first ranks and return its results, by rank.

        Raises ``RankFailedError`` if it raises anywhere or a process dies; the others may then still be at it.
        """
        self.start(function, num_ranks, *args, **kwargs)
        outcomes = self.collect(range(num_ranks), grace_s=_GRACE_S)
        failures = {rank: outcome for rank, (is_ok, outcome) in enumerate(outcomes) if not is_ok}
        if failures:
            raise RankFailedError(failures)
        return [outcome for _, outcome in outcomes]

    def start(
        self,
        function: Callable[Concatenate[dist.ProcessGroup, _P], _Result],
        num_ranks: int,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> None:
        """Call a function without waiting for it; ``collect`` brings what it gives.

        Raises ``RankFailedError`` if a process has died meanwhile.
        """
        for rank, pipe in enumerate(self._pipes[:num_ranks]):
            try:
                pipe.send((function, num_ranks, args, kwargs))
            except OSError as error:
                raise RankFailedError({rank: self._death(rank)}) from error

    def collect(
        self, ranks: range | list[int], timeout_s: float | None = None, grace_s: float = float("inf")
    ) -> list[tuple[bool, Any]]:
        """Wait for what ``start`` began, on the ranks given; for ``grace_s`` at most once one of them has failed.

        Without ``timeout_s`` the world's limit holds. What failed has ``False`` and a ``RankFailure``.
        """
        timeout_s = self._limit_s if timeout_s is None else timeout_s
        outcomes: dict[int, tuple[bool, Any]] = {}
        deadline, limit = time.monotonic() + timeout_s, f"{timeout_s:g} s"
        while len(outcomes) < len(ranks):
            waiting = [rank for rank in ranks if rank not in outcomes]
            ready = wait(
                [source for rank in waiting for source in (self._pipes[rank], self.processes[rank].sentinel)],
                timeout=max(0.0, deadline - time.monotonic()),
            )
            if not ready:
                failures = {rank: outcome for rank, (is_ok, outcome) in outcomes.items() if not is_ok}
                raise RankFailedError(failures, f"rank(s) {waiting} gave no result within {limit}")
            for rank in waiting:
                try:
                    if self._pipes[rank].poll():
                        outcomes[rank] = self._pipes[rank].recv()
                    elif self.processes[rank].sentinel in ready:
                        outcomes[rank] = (False, self._death(rank))
                except EOFError:
                    outcomes[rank] = (False, self._death(rank))
            if not all(is_ok for is_ok, _ in outcomes.values()) and time.monotonic() + grace_s < deadline:
                deadline, limit = time.monotonic() + grace_s, f"{grace_s:g} s after another failed"
        return [outcomes[rank] for rank in ranks]

    def kill(self) -> None:
        """End the processes at once, whatever they are at."""
        for process in self.processes:
            process.kill()

    def _death(self, rank: int) -> RankFailure:
        self.processes[rank].join(timeout=1.0)  # its pipe may be closed before it has ended
        return RankFailure(f"its process died with exit code {self.processes[rank].exitcode}")

    def close(self) -> None:
        """End the processes; those that do not leave by themselves are killed."""
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                pass  # that process is gone
            pipe.close()
        deadline = time.monotonic() + _LEAVING_S
        for process in self.processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> LocalWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.kill()  # they may be at something that does not end
        self.close()


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """What is started inside never gets a SIGINT, however early; one for this process waits for the end of the block.

    A terminal sends it to all processes, each of which would say where it was. Processes inherit what this thread
    blocks; other threads of this process do not, so that its handler has to wait, too. So does a handler of SIGTERM,
    as it would leave behind what is not quite started; processes started inside get that signal as ever.
    """
    ensure_running()  # where it starts multiprocessing's resource tracker it lets signals through again
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)} if is_main else {}
    handled = {each: handler for each, handler in before.items() if callable(handler)}
    for each in handled:
        signal.signal(each, lambda number, _: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for each, handler in handled.items():
            signal.signal(each, handler)
        for number in dict.fromkeys(came):
            signal.raise_signal(number)


def _serve(rank: int, world_size: int, device: str, port: int, variables: Mapping[str, str], pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent ends this one
    os.environ.update(variables)  # a process of our own; libraries such as NCCL can be told in no other way
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    if device == "cuda":
        torch.cuda.set_device(choose_gpu(rank, torch.cuda.device_count()))
    dist.init_process_group(backends_for(device), store=store, rank=rank, world_size=world_size)
    groups: dict[int, dist.ProcessGroup] = {}
    while (task := pipe.recv()) is not None:
        function, num_ranks, args, kwargs = task
        try:
            if num_ranks not in groups:
                groups[num_ranks] = dist.new_group(list(range(num_ranks)), use_local_synchronization=True)
            outcome: tuple[bool, Any] = (True, function(groups[num_ranks], *args, **kwargs))
        except BaseException as error:  # noqa: BLE001  whatever it is, the parent must hear of it
            outcome = (False, RankFailure.of(error))
        pipe.send(outcome)
    if device == "cuda":
        _leave_nccl()


def _leave_nccl() -> None:
    """Give back what NCCL has, which complains otherwise; other ranks may be gone, and need not be waited for long."""
    try:
        within(_LEAVING_S / 4, dist.destroy_process_group)
    except RuntimeError:
        pass  # this process ends in any case
