"""Ranks on one machine: emulated nodes, processes, the shape of a job."""

import multiprocessing as mp
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from fusco import Topology
from fusco.bench.ranks.emulation import describe_emulation, emulated_network
from fusco.bench.ranks.local_world import LocalWorld, RankFailedError, _interrupts_blocked, _start
from fusco.bench.ranks.torchrun import Launched
from fusco.cli.running import choose_shape, num_devices
from fusco.core.environment import SHARE_GPUS

TWO_BY_TWO = Topology((0, 0, 1, 1))


def test_ranks_of_a_node_share_a_host_and_reach_others_over_the_loopback_device():
    ranks = emulated_network(TWO_BY_TWO, {})
    assert [rank["NCCL_HOSTID"] for rank in ranks] == ["fusco-node-0"] * 2 + ["fusco-node-1"] * 2
    shared = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_SOCKET_NTHREADS": "8", "NCCL_NSOCKS_PERTHREAD": "8"}
    for rank in ranks:
        assert {**rank, **shared, "NCCL_IB_DISABLE": "1"} == rank


def test_variables_of_the_user_take_precedence_and_are_named():
    inherited = {"NCCL_SOCKET_NTHREADS": "2", "PATH": "/bin"}
    ranks = emulated_network(TWO_BY_TWO, inherited)
    assert not any({"NCCL_SOCKET_NTHREADS", "PATH"} & set(rank) for rank in ranks)
    assert describe_emulation(TWO_BY_TWO, inherited) == (
        "set: NCCL_HOSTID=fusco-node-0 | fusco-node-1, NCCL_SOCKET_IFNAME=lo, NCCL_NSOCKS_PERTHREAD=8, "
        "NCCL_P2P_NET_CHUNKSIZE=524288, NCCL_IB_DISABLE=1; kept: NCCL_SOCKET_NTHREADS=2"
    )
    everything = dict.fromkeys(ranks[0], "mine") | inherited
    assert emulated_network(TWO_BY_TWO, everything) == [{}] * 4
    assert describe_emulation(TWO_BY_TWO, everything).startswith("set: nothing; kept: NCCL_HOSTID=mine")


def test_ranks_that_share_gpus_are_hosts_of_their_own():
    ranks = emulated_network(TWO_BY_TWO, {}, num_gpus=2)
    assert [rank["NCCL_HOSTID"] for rank in ranks] == [f"fusco-rank-{rank}" for rank in range(4)]
    assert emulated_network(TWO_BY_TWO, {}, num_gpus=4) == emulated_network(TWO_BY_TWO, {})
    assert "fusco-rank-3" in describe_emulation(TWO_BY_TWO, {}, num_gpus=1)


def test_one_node_needs_nothing():
    one = Topology((0, 0, 0))
    assert emulated_network(one, {}) == [{}] * 3
    assert describe_emulation(one, {"NCCL_HOSTID": "a"}) == ""


def variables(group: dist.ProcessGroup) -> tuple[str | None, str | None]:
    return os.environ.get("FUSCO_TEST_OWN"), os.environ.get("FUSCO_TEST_ALL")


@pytest.mark.multirank
def test_each_process_has_its_own_variables_on_top_of_the_shared_ones(monkeypatch):
    monkeypatch.setenv("FUSCO_TEST_ALL", "from the parent")
    with LocalWorld(2, environment=[{"FUSCO_TEST_OWN": "a"}, {"FUSCO_TEST_ALL": "replaced"}]) as world:
        assert world.run(variables, 2) == [("a", "from the parent"), (None, "replaced")]
    assert "FUSCO_TEST_OWN" not in os.environ


def fail_or_sleep(group: dist.ProcessGroup) -> None:
    if dist.get_rank(group) == 1:
        raise ValueError("rank 1 has had enough")
    time.sleep(600)


@pytest.mark.multirank
def test_ranks_that_wait_for_a_failed_one_are_not_waited_for(monkeypatch):
    monkeypatch.setattr("fusco.bench.ranks.local_world._GRACE_S", 0.2)
    monkeypatch.setattr("fusco.bench.ranks.local_world._LEAVING_S", 0.2)
    with (
        pytest.raises(RankFailedError, match=r"(?s)\[0\] gave no result within 0.2 s after another failed.*had enough"),
        LocalWorld(2) as world,
    ):
        world.run(fail_or_sleep, 2)


@pytest.mark.multirank
def test_a_world_left_by_an_error_does_not_wait_for_ranks_at_work():
    world = LocalWorld(2)
    world.run(rank_of, 2)
    world.start(fail_or_sleep, 2)
    start = time.monotonic()
    with pytest.raises(KeyError, match="anything"), world:
        raise KeyError("anything")
    assert time.monotonic() - start < 10.0
    assert not any(process.is_alive() for process in world.processes)


def rank_of(group: dist.ProcessGroup) -> int:
    return dist.get_rank(group)


def die(group: dist.ProcessGroup) -> None:
    os._exit(3)


@pytest.mark.multirank
def test_a_rank_that_has_died_meanwhile_is_a_failed_rank():
    with LocalWorld(2) as world:
        world.run(rank_of, 2)
        world.start(die, 2)
        for process in world.processes:
            process.join(timeout=30)
        with pytest.raises(RankFailedError, match=r"^rank 0: its process died with exit code 3$"):
            world.start(rank_of, 2)


def crash(group: dist.ProcessGroup) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.multirank
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_an_interrupt_is_for_the_parent_alone_and_a_rank_that_a_signal_ends_says_where(start_method):
    with LocalWorld(1, start_method=start_method) as world:
        if start_method == "forkserver":  # a moment after it is forked
            world.run(rank_of, 1)
        os.kill(world.processes[0].pid, signal.SIGINT)
        assert world.run(rank_of, 1) == [0]
        with pytest.raises(RankFailedError) as raised:
            world.run(crash, 1)
        assert num_stacks() == 1
    first, *lines = str(raised.value).splitlines()
    assert first == "rank 0: its process died with exit code -11 (SIGSEGV)"
    current = next(i for i, line in enumerate(lines) if line.startswith("Current thread"))
    assert re.fullmatch(rf'  File ".*{Path(__file__).name}", line \d+ in crash', lines[current + 1])
    assert not any("Extension modules" in line for line in lines)
    assert raised.value.unexpected.splitlines() == lines
    assert num_stacks() == 0


def num_stacks() -> int:
    """Return this process's open files for stacks."""
    opened = Path("/proc/self/fd").iterdir()
    return sum("memfd:stacks" in str(each.readlink()) for each in opened if each.is_symlink())


def test_a_rank_without_descriptors_is_one_sentence(capfd):
    context = mp.get_context("forkserver")
    first = context.Process(target=os.getpid)  # the forkserver has its own descriptors from here on
    first.start()
    first.join()
    free = [os.dup(0) for _ in range(6)]  # enough to reach the forkserver, which then misses the rest
    for each in free:
        os.close(each)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], limits[1]))
    try:
        with pytest.raises(RankFailedError) as raised:
            _start(context.Process(target=os.getpid), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert re.match(
        r"rank 0: its process .*: Too many open files; this process may have \d+ \(ulimit -n\)$", str(raised.value)
    )
    time.sleep(0.5)
    assert not capfd.readouterr().err


@pytest.mark.parametrize("error", [EOFError("unexpected EOF"), BlockingIOError(11, "Resource temporarily unavailable")])
def test_a_rank_that_cannot_be_started_is_a_failed_rank(error, monkeypatch):
    def fail(_):
        raise error

    monkeypatch.setattr(mp.context.ForkServerProcess, "start", fail)
    with pytest.raises(
        RankFailedError, match=rf"^rank 0: its process could not be started: {type(error).__name__}: .+"
    ):
        LocalWorld(2)


@pytest.mark.parametrize("dies", ["before it reads its task", "while it writes its result"])
def test_a_rank_that_dies_halfway_is_a_failed_rank(dies):
    ours, theirs = mp.Pipe()
    world = object.__new__(LocalWorld)
    world._stacks = [Connection(os.memfd_create("none"))]
    world._pipes, world.processes = [ours], [SimpleNamespace(join=lambda timeout: None, exitcode=-9)]
    if dies == "before it reads its task":
        ours.send("a task")
    else:
        os.write(theirs.fileno(), b"\0\0\1\0 of which this is the beginning")
    theirs.close()
    is_ok, failure = world._outcome(0, has_ended=False)
    assert (is_ok, failure.sentence) == (False, "its process died with exit code -9 (SIGKILL)")


def test_environments_must_be_as_many_as_ranks():
    with pytest.raises(ValueError, match="3 ranks need an environment each, got 2"):
        LocalWorld(3, environment=[{}, {}])


@pytest.mark.parametrize(
    ("device", "asked", "num_gpus", "shape"),
    [
        ("cpu", (None, None), 0, (2, 2)),
        ("cpu", (3, 1), 0, (3, 1)),
        ("cuda", (None, None), 4, (1, 4)),
        ("cuda", (2, None), 4, (2, 2)),
        ("cuda", (4, None), 4, (4, 1)),
        ("cuda", (None, 2), 4, (1, 2)),
        ("cuda", (2, 1), 4, (2, 1)),
    ],
)
def test_shape_on_this_machine(device, asked, num_gpus, shape):
    assert choose_shape(device, *asked, None, num_gpus) == shape


@pytest.mark.parametrize(
    ("asked", "num_gpus", "message"),
    [
        ((2, 4), 4, "8 ranks need a GPU each, but torch finds 4"),
        ((3, None), 4, "4 GPUs do not divide among 3 nodes; pass --ranks-per-node"),
        ((3, 2), 4, "6 ranks need a GPU each, but torch finds 4"),
    ],
)
def test_too_few_gpus(asked, num_gpus, message, monkeypatch):
    monkeypatch.delenv(SHARE_GPUS, raising=False)
    with pytest.raises(ValueError, match=message):
        choose_shape("cuda", *asked, None, num_gpus)


def test_ranks_that_share_gpus_may_be_more(monkeypatch):
    monkeypatch.setenv(SHARE_GPUS, "1")
    assert choose_shape("cuda", 2, 4, None, 1) == (2, 4)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ValueError, match="--device cuda needs a GPU, and torch finds none"):
        num_devices("cuda")


def test_shape_of_a_launched_job():
    job = Launched(rank=0, world_size=16, local_rank=0, local_world_size=8)
    assert choose_shape("cuda", None, None, job, 8) == (2, 8)
    assert choose_shape("cuda", 4, 4, job, 8) == (4, 4)
    assert choose_shape("cpu", None, 2, job, 0) == (8, 2)
    with pytest.raises(ValueError, match="16 ranks were launched, 8 on this machine, which are not 3 nodes of 8"):
        choose_shape("cuda", 3, None, job, 8)
    with pytest.raises(ValueError, match="not 5 nodes of 3"):
        choose_shape("cuda", None, 3, job, 8)


def test_an_interrupt_waits_until_ranks_are_started_and_does_not_reach_them():
    is_blocked = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    done = threading.Event()
    other = threading.Thread(target=done.wait)  # does not block the signal, so it receives it
    other.start()
    goes_on = False
    try:
        with pytest.raises(KeyboardInterrupt), _interrupts_blocked():  # noqa: PT012  the block is what is tested
            child = subprocess.run([sys.executable, "-c", is_blocked], capture_output=True, text=True, check=True)
            signal.pthread_kill(other.ident, signal.SIGINT)
            time.sleep(0.1)
            goes_on = True
    finally:
        done.set()
        other.join()
    assert goes_on
    assert child.stdout == "True\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
