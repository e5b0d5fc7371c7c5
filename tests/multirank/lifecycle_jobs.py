"""Functions on ranks: one rank drops or aborts its communicator, or forks, while others use theirs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fault_jobs import fail

import fusco
from fusco.core.environment import RAILS_VARIABLE
from fusco.core.errors import Stall
from fusco.rails.endpoint import Endpoint
from fusco.rails.rail import Address

TIMEOUT_S = 20.0
NUM_ROUNDS = 60


def _open(group: dist.ProcessGroup, ranks_per_node: int) -> fusco.Communicator:
    return fusco.Communicator(
        group,
        num_experts=4,
        num_topk=2,
        max_tokens_per_rank=8,
        max_bytes_per_token=64,
        ranks_per_node=ranks_per_node,
        settings=fusco.Settings(timeout_s=TIMEOUT_S, slice_bytes=1 << 12),
    )


def _use(comm: fusco.Communicator, value: float = 1.0) -> float:
    """Run a dispatch and a combine; the result is twice the value of all ranks."""
    handle = (out := comm.dispatch(torch.full((8, 4), value), torch.arange(16).view(8, 2) % 4)).handle
    return float(comm.combine(out.rows, handle)[0, 0])


def drop(group: dist.ProcessGroup, ranks_per_node: int, how: str) -> tuple[str, tuple[int, ...], float]:
    """Rank 1 drops or aborts, rank 0 calls once more: return its error, the ranks it names, and its seconds."""
    comm = _open(group, ranks_per_node)
    _use(comm)
    if group.rank() == 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if how == "abort":
                comm.abort()
            del comm
        return "", (), 0.0
    began = time.monotonic()
    try:
        _use(comm)
    except fusco.PeerFailureError as error:
        took_s = time.monotonic() - began
        comm.close()
        return str(error), error.peers, took_s
    return "no error", (), 0.0


def end_in_a_handler(group: dist.ProcessGroup, ranks_per_node: int, how: str) -> tuple[str, str, float, int]:
    """A signal handler of rank 1 closes or aborts in the middle of a dispatch.

    Return the type of this rank's error, its text, its seconds, and the descriptors that are left.
    """
    num_before = len(os.listdir("/proc/self/fd"))
    comm = _open(group, ranks_per_node)
    _use(comm)
    run, handled = comm._engine._run, []

    def interrupted(*args: object) -> None:
        if not handled:
            signal.raise_signal(signal.SIGUSR1)
        run(*args)

    before = signal.signal(signal.SIGUSR1, lambda *_: handled.append(getattr(comm, how)()))
    began, kind, text = time.monotonic(), "no error", ""
    try:
        if group.rank() == 1:
            comm._engine._run = interrupted
        for _ in range(2):
            _use(comm)
    except fusco.FuscoError as error:
        kind, text = type(error).__name__, str(error)
    finally:
        signal.signal(signal.SIGUSR1, before)
    took_s = time.monotonic() - began
    comm.close()
    return kind, text, took_s, len(os.listdir("/proc/self/fd")) - num_before


def close_while_others_call(group: dist.ProcessGroup, ranks_per_node: int) -> tuple[str, float]:
    """Rank 1 closes while rank 0 is in a verb, then rank 0 closes: return the first error, and the seconds of both."""
    comm = _open(group, ranks_per_node)
    _use(comm)
    began, kind = time.monotonic(), "no error"
    try:
        (_use if group.rank() == 0 else fusco.Communicator.close)(comm)
    except fusco.MismatchError as error:
        kind = str(error)
    comm.close()
    return kind, time.monotonic() - began


def drop_while_others_close(group: dist.ProcessGroup, ranks_per_node: int) -> float:
    """Return the seconds that rank 0 takes to close while rank 1 does not close."""
    comm = _open(group, ranks_per_node)
    _use(comm)
    began = time.monotonic()
    if group.rank() == 0:
        comm.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        del comm
    return time.monotonic() - began


def refuse_and_end(group: dist.ProcessGroup, ranks_per_node: int, how: str) -> str:
    """Rank 1 refuses a call and ends after rank 0 looked for its record, before rank 0 looks for ranks that are gone.

    Return the type of the error of rank 0.
    """
    comm, kind = _open(group, ranks_per_node), ""
    _use(comm)
    if group.rank() == 1:
        dist.barrier(group)
        with contextlib.suppress(ValueError), comm if how == "raises" else contextlib.nullcontext():
            comm.dispatch(torch.ones(8, 4), torch.full((8, 2), 4))
        if how == "exits":
            os._exit(0)
        comm.abort()
        return ""
    watchdog, has_waited = comm._session._watchdog, []
    check_peers = watchdog._check_peers

    def check_late(waiting_for: Stall, now: float) -> None:
        if not has_waited and waiting_for.phase.startswith("records of"):
            has_waited.append(dist.barrier(group))
            while not (watchdog.has_failed_rank or watchdog.has_departed_rank):
                time.sleep(0.001)
        check_peers(waiting_for, now)

    watchdog._check_peers = check_late  # type: ignore[method-assign]
    try:
        _use(comm)
    except fusco.FuscoError as error:
        kind = type(error).__name__
    comm.close()
    return kind


def share_between_threads(group: dist.ProcessGroup, ranks_per_node: int) -> tuple[int, int, list[str]]:
    """Use one communicator in two threads of each rank; return the numbers of right and wrong rounds, and errors."""
    right, wrong, errors = [], [], []
    barrier = threading.Barrier(2)

    def work(value: float) -> None:
        barrier.wait()
        for _ in range(NUM_ROUNDS):
            try:
                (right if _use(comm, value) == 2 * value else wrong).append(value)
            except fusco.ThreadError as error:
                errors.append(str(error))
                break
        barrier.wait()  # the other thread may take over from a thread that has ended

    with _open(group, ranks_per_node) as comm:
        _use(comm)
        comm.hand_over()
        threads = [threading.Thread(target=work, args=(value,), name=f"thread {value:g}") for value in (3.0, 5.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return len(right), len(wrong), errors


def fork_inside(group: dist.ProcessGroup, ranks_per_node: int) -> tuple[int, float]:
    """Leave the block in a child of rank 0, with an exception and without; then the ranks continue."""
    with _open(group, ranks_per_node) as comm:
        _use(comm)
        codes = []
        for fails in (True, False):
            if group.rank() == 0:
                if not (child := os.fork()):
                    _end_in_child(comm, fails=fails)
                codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            _use(comm)
        return sum(codes), _use(comm)


def _end_in_child(comm: fusco.Communicator, *, fails: bool) -> None:
    code = 9
    try:
        with comm:
            if fails:
                fail()
        code = 0
    except ZeroDivisionError:
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def refuse_rails(group: dist.ProcessGroup) -> tuple[str, float]:
    """Each rank is a node with rails, and what listens at the address of rank 0 does not know its secret.

    Return the error of this rank, and the seconds until it was raised.
    """
    listen, began = Endpoint.listen, time.monotonic()

    def listen_for_others(endpoint: Endpoint) -> Address:
        return dataclasses.replace(listen(endpoint), secret=bytes(32))

    with contextlib.ExitStack() as patched:
        patched.enter_context(mock.patch.dict(os.environ, {RAILS_VARIABLE: "lo"}))
        if group.rank() == 0:
            patched.enter_context(mock.patch.object(Endpoint, "listen", listen_for_others))
        try:
            _open(group, 1).close()
        except fusco.PeerFailureError as error:
            return str(error), time.monotonic() - began
    return "no error", 0.0


def resize(group: dist.ProcessGroup, ranks_per_node: int) -> list[tuple[int, ...]]:
    """Change sizes and experts, before and after a rank leaves; return the ranks after each change."""
    comm = _open(group, ranks_per_node)
    rank, seen = comm.rank, []
    _use(comm)
    with pytest.raises(ValueError if rank == 1 else fusco.RejectedInputError, match="num_topk"):
        comm.resize(num_topk=9 if rank == 1 else 2)
    with pytest.raises(fusco.MismatchError, match="max_tokens_per_rank"):
        comm.resize(max_tokens_per_rank=16 + rank)
    handle = comm.dispatch(torch.ones(8, 4), torch.arange(16).view(8, 2) % 4).handle
    comm.resize(max_tokens_per_rank=32, num_experts=8, max_bytes_per_token=256)
    seen.append(comm.ranks)
    with pytest.raises(ValueError, match="handle"):
        comm.dispatch_again(torch.ones(8, 4), handle)
    assert comm.placement.num_experts == 8
    assert comm.combine(*_ones(comm, 8)).eq(2).all()
    comm.shrink(leaving=[3])
    if rank == 3:
        return seen
    comm.resize(max_tokens_per_rank=64, num_experts=4)
    seen.append(comm.ranks)
    assert comm.combine(*_ones(comm, 4))[:, 0].tolist() == [2.0 - (token % 2) for token in range(32)]
    comm.close()
    return seen


def _ones(comm: fusco.Communicator, num_experts: int) -> tuple[torch.Tensor, fusco.Handle]:
    sent = comm.dispatch(torch.ones(32, 64), torch.arange(64).view(32, 2) % num_experts)
    return sent.rows, sent.handle
