"""What becomes of communicators that are not closed, and of those that a forked process has a copy of."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import socket
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fusco
from forked_interpreter import ForkedInterpreter

LIMIT_S = 30.0


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(**given):
    sizes = {"num_experts": 4, "num_topk": 2, "max_tokens_per_rank": 8, "max_bytes_per_token": 64}
    return fusco.Communicator(**sizes, settings=fusco.Settings(slice_bytes=1 << 16, **given))


def use(comm):
    x = torch.ones(8, 4, requires_grad=True)
    return comm.dispatch(x, torch.zeros(8, 2, dtype=torch.int64), torch.ones(8, 2))


def held():
    """Descriptors and threads of this process, and its mappings of shared memory."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(maps)


def wait_for(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_dropped_communicators_are_given_back_with_a_warning_that_names_them(group):
    use(comm := make())  # what the first call loads and compiles stays
    comm.close()
    del comm
    gc.collect()
    before = held()
    gc.disable()  # the last reference is enough
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(10):
                use(make())
        assert wait_for(lambda: held() <= before), (held(), before)
    finally:
        gc.enable()
    texts = [str(warning.message) for warning in caught if warning.category is ResourceWarning]
    assert texts == ["a communicator of rank 0 (num_experts=4, device cpu) was dropped without being closed"] * 10


def test_a_communicator_that_was_closed_is_dropped_in_silence(group):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with make() as comm:
            use(comm)
        left = make()
        left.abort()
        del comm, left
        gc.collect()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_communicator_cannot_be_copied(group, duplicate):
    with make() as comm:
        with pytest.raises(TypeError, match="a communicator cannot be copied or pickled"):
            duplicate(comm)
        use(comm)


def test_a_graph_keeps_its_communicator(group):
    x = torch.ones(8, 4, requires_grad=True)
    comm = make()
    dispatched = comm.dispatch(x, torch.zeros(8, 2, dtype=torch.int64), torch.ones(8, 2))
    out = comm.combine(dispatched.rows, dispatched.handle)
    known = weakref.ref(comm)
    del comm, dispatched
    gc.collect()
    out.sum().backward()
    assert x.grad.tolist() == [[2.0] * 4] * 8
    with pytest.warns(ResourceWarning, match="dropped without being closed"):
        del out
    assert known() is None


def test_an_error_inside_is_what_is_raised_whatever_goes_wrong_at_the_end(group, monkeypatch):
    comm = make()
    close = comm._engine.close

    def fail():
        close()
        raise MemoryError("no room to close")

    monkeypatch.setattr(comm._engine, "close", fail)
    with pytest.raises(ZeroDivisionError), comm:
        raise ZeroDivisionError
    assert comm._is_closed


def test_an_error_inside_a_verb_is_raised_though_it_cannot_be_told(group, monkeypatch):
    with make() as comm:
        monkeypatch.setattr(comm._engine._watchdog, "give_up", lambda _: 1 / 0)
        monkeypatch.setattr(comm._engine, "_move_rows", lambda *_: (_ for _ in ()).throw(KeyError("the balancer")))
        warnings.simplefilter("ignore")
        with pytest.raises(KeyError, match="the balancer") as caught:
            use(comm)
    assert sys.version_info < (3, 11) or caught.value.__notes__ == [
        "the other ranks could not be notified: ZeroDivisionError: division by zero"
    ]


def test_a_second_thread_is_refused_and_the_first_goes_on(group):
    with make() as comm:
        use(comm)
        errors = []

        def intrude():
            try:
                use(comm)
            except fusco.ThreadError as error:
                errors.append(str(error))

        thread = threading.Thread(target=intrude, name="intruder")
        thread.start()
        thread.join(LIMIT_S)
        assert "'intruder' called dispatch" in errors[0]
        assert "'MainThread'" in errors[0]
        use(comm)


def test_one_node_opens_no_transport(group):
    def listening():
        inodes = {
            re.sub(r"\D", "", os.readlink(entry))
            for entry in Path("/proc/self/fd").iterdir()
            if entry.exists() and "socket:" in os.readlink(entry)
        }
        tables = [Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
        rows = [line.split() for table in tables for line in table]
        return {row[1] for row in rows if row[3] == "0A" and row[9] in inodes}

    before = listening()
    with make():
        opened = listening() - before
    assert len(opened) == 1  # the status server's
    assert next(iter(opened)).startswith("0100007F:")  # 127.0.0.1


IMPORTS = """
import os, sys, threading, time, warnings
import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
import compiled_kernels, fusco, fusco.api.communicator
"""
BEGIN = """
warnings.simplefilter("always")
# Not gloo, whose own groups keep a forked process from ending.
rank, num_ranks = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", int(sys.argv[3]), is_master=rank == 0, wait_for_workers=False)
dist.init_process_group("fake", store=store, rank=rank, world_size=num_ranks)

def make():
    return fusco.Communicator(
        num_experts=4, num_topk=2, max_tokens_per_rank=8, max_bytes_per_token=64, ranks_per_node=1
    )

def use(comm):
    return comm.dispatch(torch.ones(8, 4), torch.zeros(8, 2, dtype=torch.int64))

def wait_for(child):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            print("child ended with", os.waitstatus_to_exitcode(status), flush=True)
            return
        time.sleep(0.01)
    print("child hangs", flush=True)
    os.kill(child, 9)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def output_of():
    """Returns a function: what the first rank of a program says, in lines, and its errors."""

    def output_of(program, num_ranks=1):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ranks = [[str(rank), str(num_ranks), str(port)] for rank in range(num_ranks)]
        ended = interpreter.run(BEGIN + program, *ranks)
        assert {rank.code for rank in ended} == {0}, ended
        return ended[0].stdout.splitlines(), ended[0].stderr

    with ForkedInterpreter(IMPORTS) as interpreter:
        yield output_of


def test_a_forked_process_has_no_part_in_its_parents_communicator(output_of):
    lines, errors = output_of("""
with make() as comm:
    use(comm)
    if not (child := os.fork()):
        comm._engine.abandon = comm._engine.depart = comm._engine.close = lambda *_: print("the child did something")
        for verb in (lambda: use(comm), comm.synchronize, lambda: comm.shuffle({}, {})):
            try:
                verb()
            except fusco.ClosedError as error:
                print(f"process {os.getppid()}" in str(error) and f"process {os.getpid()}" in str(error), flush=True)
    else:
        wait_for(child)
        use(comm)
        print("the parent goes on", flush=True)
if not child:
    comm.close()
    comm.abort()
    sys.exit(0)
""")
    assert lines == ["True"] * 3 + ["child ended with 0", "the parent goes on"]
    assert errors == ""


@pytest.mark.parametrize(("num_ranks", "end"), [(1, "comm = None; sys.exit(3)"), (2, "sys.exit(3)")])
def test_a_forked_process_ends_in_silence_with_a_communicator_that_was_not_closed(output_of, num_ranks, end):
    program = f"""
comm = make()
use(comm)
if not (child := os.fork()):
    {end}
wait_for(child)
use(comm)
comm.close()
"""
    lines, errors = output_of(program, num_ranks)
    assert lines == ["child ended with 3"]
    assert errors == ""


def test_a_forked_process_ends_after_an_all_to_all(output_of):
    lines, errors = output_of("""
fusco.all_to_all(torch.empty(4), torch.ones(4))
if not (child := os.fork()):
    try:
        fusco.all_to_all(torch.empty(4), torch.ones(4))
    except fusco.ClosedError:
        sys.exit(4)
wait_for(child)
fusco.all_to_all(torch.empty(4), torch.ones(4))
""")
    assert lines == ["child ended with 4"]
    assert errors == ""


def test_a_process_ends_with_a_communicator_that_was_not_closed(output_of):
    lines, errors = output_of("comm = make(); use(comm); print('done')")
    assert lines == ["done"]
    assert "ResourceWarning: a communicator of rank 0 (num_experts=4, device cpu) was dropped without" in errors
    assert "Traceback" not in errors


def test_a_process_ends_while_a_daemon_thread_waits_in_a_call(output_of):
    lines, errors = output_of("""
from fusco.control.counters import CounterWait

comm, has_begun = make(), threading.Event()

def call():
    with comm._session.access.using("dispatch"):
        wait, counters = CounterWait(), comm._session._memory.counters(0, 99)
        while True:  # in compiled code, which reads the memory without the GIL
            wait.sleep(counters, [], is_any=False)
            has_begun.set()

threading.Thread(target=call, daemon=True).start()
has_begun.wait()
print("done")
""")
    assert lines == ["done"]
    assert "was dropped without being closed" in errors
    assert "Traceback" not in errors
