"""Several ranks on this machine: processes of one group that run functions on request."""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.resource_tracker import ensure_running
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported without saying so

from fusco.bench.ranks.failures import RankFailedError, RankFailure
from fusco.bench.ranks.progress import new_store
from fusco.bench.ranks.torchrun import backends_for, choose_gpu
from fusco.core.errors import reason_of
from fusco.core.threads import within

_Result = TypeVar("_Result")

# Modules imported before ranks are forked, which saves each the seconds of importing them. Tests add theirs.
PRELOADED = ["fusco.api.communicator", "fusco.bench.ranks.local_world"]
# Limit of the other ranks' end once one has failed: they may wait for it without a limit.
_GRACE_S = 30.0
# Limit of a process's exit: interpreters end slowly on a machine with more ranks than cores.
_LEAVING_S = 20.0
# Descriptors open at once while a process is started: pipes to the forkserver, to the process, a socket, and to spare.
_STARTING_DESCRIPTORS = 12
# Of the stacks of a process that a signal has ended: faulthandler writes at most 100 threads of 100 functions.
_STACKS_BYTES = 1 << 20


class LocalWorld(AbstractContextManager["LocalWorld"]):
    """``world_size`` processes, ranks of one group (gloo, and NCCL for CUDA tensors), each with one compute thread.

    With ``device="cuda"`` each rank's current device is that of ``choose_gpu``. The processes inherit the environment
    of this one, updated with ``environment[rank]`` before NCCL or CUDA read it. On the CPU they are forked from a
    process that has imported PyTorch and, if this is the first world, ``preloaded`` modules, and done nothing else.
    With CUDA, or ``start_method="spawn"``, they are new interpreters, which take longer to start and end like those of
    a user.

    A function given to ``run`` is called as ``function(group, *args)`` on every rank, where ``group`` has the first
    ``num_ranks`` ranks. It must be importable, its result must pickle, and it must finish within ``limit_s`` seconds.

    Ctrl-C interrupts this process alone; the ranks ignore it. If an error ends the ``with`` block, they are killed.
    """

    def __init__(
        self,
        world_size: int,
        device: str = "cpu",
        environment: Sequence[Mapping[str, str]] | None = None,
        limit_s: float = 600.0,
        start_method: Literal["forkserver", "spawn"] | None = None,
        preloaded: Sequence[str] = (),
    ) -> None:
        if environment is not None and len(environment) != world_size:
            raise ValueError(f"{world_size} ranks need an environment each, got {len(environment)}")
        self.world_size, self.device, self._limit_s = world_size, device, limit_s
        self.store = new_store()
        context: Any = mp.get_context(start_method or ("spawn" if device == "cuda" else "forkserver"))
        if context.get_start_method() == "forkserver":
            context.set_forkserver_preload([*PRELOADED, *preloaded])
        self._pipes: list[Connection] = []
        self._stacks: list[Connection] = []  # files in memory; as connections, which multiprocessing passes on
        self.processes: list[BaseProcess] = []
        try:
            with _interrupts_blocked():
                for rank in range(world_size):
                    parent_end, rank_end = context.Pipe()
                    stacks = Connection(os.memfd_create("stacks"))
                    variables = {**os.environ, **(environment[rank] if environment else {})}
                    arguments = (rank, world_size, device, self.store.port, variables, rank_end, stacks)
                    process = context.Process(target=_serve, args=arguments, name=f"rank {rank}", daemon=True)
                    _start(process, rank)
                    rank_end.close()
                    self._pipes.append(parent_end)
                    self._stacks.append(stacks)
                    self.processes.append(process)
        except BaseException:
            self.kill()
            raise

    def run(self, function: Callable[..., _Result], num_ranks: int, *args: Any, **kwargs: Any) -> list[_Result]:
        """Call a function on the first ranks and return its results, by rank.

        Raises ``RankFailedError`` if it raises on any rank or a process dies; others may then still execute it.
        """
        self.start(function, num_ranks, *args, **kwargs)
        return self.results(range(num_ranks), grace_s=_GRACE_S)

    def start(self, function: Callable[..., object], num_ranks: int, *args: Any, **kwargs: Any) -> None:
        """Call a function without waiting for it; ``results`` returns its results.

        Raises ``RankFailedError`` if a process has died since the last call.
        """
        for rank, pipe in enumerate(self._pipes[:num_ranks]):
            try:
                pipe.send((function, num_ranks, args, kwargs))
            except OSError as error:
                raise RankFailedError({rank: self._death(rank)}) from error

    def results(
        self, ranks: range | list[int], timeout_s: float | None = None, grace_s: float = float("inf")
    ) -> list[Any]:
        """Wait as ``collect`` and return the results; raises ``RankFailedError`` if there is a failure among them."""
        outcomes = self.collect(ranks, timeout_s, grace_s)
        failures = {rank: outcome for rank, (is_ok, outcome) in zip(ranks, outcomes, strict=True) if not is_ok}
        if failures:
            raise RankFailedError(failures)
        return [outcome for _, outcome in outcomes]

    def collect(
        self, ranks: range | list[int], timeout_s: float | None = None, grace_s: float = float("inf")
    ) -> list[tuple[bool, Any]]:
        """Wait for the calls of ``start`` on these ranks, for at most ``grace_s`` once one of them has failed.

        Returns for each rank ``True`` and its result, or ``False`` and a ``RankFailure``. ``timeout_s`` is by default
        the limit of the world.
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
                if outcome := self._outcome(rank, has_ended=self.processes[rank].sentinel in ready):
                    outcomes[rank] = outcome
            if not all(is_ok for is_ok, _ in outcomes.values()) and time.monotonic() + grace_s < deadline:
                deadline, limit = time.monotonic() + grace_s, f"{grace_s:g} s after another failed"
        return [outcomes[rank] for rank in ranks]

    def kill(self) -> None:
        """Kill the processes at once."""
        for process in self.processes:
            process.kill()

    def _outcome(self, rank: int, *, has_ended: bool) -> tuple[bool, Any] | None:
        """Return what a rank has sent, or its death; ``None`` if there is nothing yet."""
        try:
            if self._pipes[rank].poll():
                return self._pipes[rank].recv()
        except (EOFError, OSError):  # the latter if it had not read everything, or was writing
            has_ended = True
        return (False, self._death(rank)) if has_ended else None

    def _death(self, rank: int) -> RankFailure:
        self.processes[rank].join(timeout=1.0)  # its pipe may close before it has ended
        stacks = os.pread(self._stacks[rank].fileno(), _STACKS_BYTES, 0).decode(errors="replace")
        stacks = stacks.partition("\nExtension modules:")[0]  # which are many, and the same on all ranks
        died = _how_it_died(self.processes[rank].exitcode)
        return RankFailure(died, traceback=stacks, says_enough=not stacks, has_died=True)

    def close(self) -> None:
        """End the processes; those that do not exit within a limit are killed."""
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                pass  # that process has died
        for opened in (*self._pipes, *self._stacks):
            opened.close()
        deadline = time.monotonic() + _LEAVING_S
        for process in self.processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            self.kill()  # they may be in a call that does not return
        self.close()


def _how_it_died(code: int | None) -> str:
    """Return the end of a process as a sentence.

    >>> _how_it_died(3), _how_it_died(-9)
    ('its process died with exit code 3', 'its process died with exit code -9 (SIGKILL)')
    """
    died = f"its process died with exit code {code}"
    return f"{died} ({signal.Signals(-code).name})" if code and -code in set(signal.Signals) else died


def _start(process: BaseProcess, rank: int) -> None:
    """Start a rank's process; ``RankFailedError`` if that fails."""
    try:
        _check_descriptors()
        process.start()
    except (EOFError, OSError) as error:  # EOFError: the process that forks them has died
        reason = reason_of(error) if isinstance(error, OSError) else error
        failure = RankFailure(f"its process could not be started: {type(error).__name__}: {reason}")
        raise RankFailedError({rank: failure}) from error


def _check_descriptors() -> None:
    """Raise ``OSError`` without the descriptors of a start: the forkserver would print a traceback halfway."""
    with ExitStack() as taken:
        for _ in range(_STARTING_DESCRIPTORS):
            taken.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Start processes that block SIGINT from their first instruction; defer this process's until the end of the block.

    A terminal sends SIGINT to all processes, and each would print a traceback. Processes inherit the mask of this
    thread. Other threads of this process do not, so its handler is deferred, too. So is that of SIGTERM, which would
    leave processes behind that have just been started; those still receive SIGTERM.
    """
    ensure_running()  # starting multiprocessing's resource tracker unblocks signals
    received: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)} if is_main else {}
    handled = {each: handler for each, handler in before.items() if callable(handler)}
    for each in handled:
        signal.signal(each, lambda number, _: received.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for each, handler in handled.items():
            signal.signal(each, handler)
        for number in dict.fromkeys(received):
            signal.raise_signal(number)


def _serve(
    rank: int,
    world_size: int,
    device: str,
    port: int,
    variables: Mapping[str, str],
    pipe: Connection,
    stacks: Connection,
) -> None:
    faulthandler.enable(stacks.fileno())  # if a signal such as SIGSEGV ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent ends this one
    os.environ.update(variables)  # NCCL and CUDA have no other configuration
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
        except BaseException as error:  # noqa: BLE001  any error is reported to the parent
            outcome = (False, RankFailure.of(error))
        pipe.send_bytes(pickle.dumps(outcome))  # send() would pass a descriptor for each tensor
    if device == "cuda":
        _destroy_group()


def _destroy_group() -> None:
    """Destroy the process group, as NCCL warns otherwise; briefly, since other ranks may have died."""
    try:
        within(_LEAVING_S / 4, dist.destroy_process_group, "the end of the process group")
    except RuntimeError:
        pass  # this process ends in any case
