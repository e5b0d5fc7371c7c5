"""Hosts, rails, rates, links that go down, and what is left of a testbed: nothing."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fusco.testbed import BORROWED_TOS, Namespaces, Testbed, TestbedError, run_job

STREAMS = str(Path(__file__).with_name("streams.py"))
CAP_SYS_ADMIN, PR_CAPBSET_DROP = 21, 24
RATE, NUM_BYTES = 200_000_000, 12 << 20
# A process that makes a testbed with a sleeping process in it, reports both, and waits.
OWNER = """
import sys, time
from fusco.testbed import Testbed
bed = Testbed(2, 2, "1gbit", ranks_per_host=2)
sleeper = bed.spawn(1, ["sleep", "60"], local_rank=1)
while not open(f"/proc/{sleeper.pid}/cmdline", "rb").read().startswith(b"sleep"):
    time.sleep(0.01)
print(sleeper.pid, bed._keeper.pid, flush=True)
time.sleep(60)
"""


Place = tuple[int, int]  # host, rail


def exchange(
    bed: Testbed, *pairs: tuple[Place, Place], num_bytes: int = NUM_BYTES, tos: tuple[int, ...] = ()
) -> list[float]:
    """Send bytes between places, all pairs at once; return each pair's bits per second."""
    receivers = []
    for i, (_, (host, rail)) in enumerate(pairs):
        command = [sys.executable, STREAMS, "receive", bed.address(host, rail), str(7000 + i)]
        receivers.append(bed.spawn(host, command, stdout=subprocess.PIPE))
        assert receivers[-1].stdout.readline() == "listening\n"
    for i, ((host, rail), (to_host, to_rail)) in enumerate(pairs):
        source, target = bed.address(host, rail), bed.address(to_host, to_rail)
        bed.spawn(
            host,
            [sys.executable, STREAMS, "send", target, str(7000 + i), str(num_bytes), source, *map(str, tos[i : i + 1])],
        )
    results = [json.loads(receiver.communicate(timeout=30)[0]) for receiver in receivers]
    assert [result["bytes"] for result in results] == [num_bytes] * len(pairs)
    return [8 * num_bytes / result["seconds"] for result in results]


@pytest.fixture(scope="module")
def bed():
    with Testbed(3, 2, RATE) as testbed:
        yield testbed


def output(bed: Testbed, host: int, *command: str) -> str:
    return bed.spawn(host, command, stdout=subprocess.PIPE).communicate(timeout=20)[0].strip()


def test_hosts_have_names_and_interfaces_of_their_own(bed):
    code = "import socket; print(socket.gethostname(), *sorted(name for _, name in socket.if_nameindex()))"
    assert [output(bed, host, sys.executable, "-c", code) for host in range(2)] == [
        "host0 lo rail0 rail1",
        "host1 lo rail0 rail1",
    ]
    assert bed.interface(1) == "rail1"


def test_nothing_outside_is_reachable(bed):
    code = "import socket; print(socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect_ex(('192.0.2.1', 9)))"
    assert output(bed, 0, sys.executable, "-c", code) == "101"  # ENETUNREACH


def test_a_rail_carries_its_rate_and_counts_bytes(bed):
    before = [bed.counters(host, 1) for host in range(3)]
    (rate,) = exchange(bed, ((0, 1), (1, 1)))
    assert 0.95 * RATE <= rate <= 1.02 * RATE
    after = [bed.counters(host, 1) for host in range(3)]
    assert NUM_BYTES <= after[0].sent_bytes - before[0].sent_bytes <= 1.05 * NUM_BYTES
    assert NUM_BYTES <= after[1].received_bytes - before[1].received_bytes <= 1.05 * NUM_BYTES
    assert after[2].sent_bytes - before[2].sent_bytes < NUM_BYTES / 100


def test_rails_are_limited_separately_also_to_another_rail(bed):
    rates = exchange(bed, ((0, 0), (1, 0)), ((0, 1), (2, 0)))
    assert all(0.95 * RATE <= rate <= 1.02 * RATE for rate in rates)


def test_incast_shares_the_receivers_rate(bed):
    rates = exchange(bed, ((0, 0), (2, 0)), ((1, 0), (2, 0)), num_bytes=NUM_BYTES // 2)
    assert 0.85 * RATE <= sum(rates) <= 1.4 * RATE  # the slower one ends alone
    assert min(rates) < 0.7 * RATE


def test_borrowed_traffic_waits_at_the_receivers_port():
    with Testbed(3, 1, RATE) as bed:
        rates = exchange(bed, ((0, 0), (2, 0)), ((1, 0), (2, 0)), tos=(0, BORROWED_TOS))
    assert rates[0] > 0.9 * RATE
    assert rates[1] < 0.6 * RATE  # it has the rail after the other


def test_a_rate_changes_while_traffic_flows(bed):
    command = [sys.executable, STREAMS, "receive", bed.address(1, 0), "7100"]
    receiver = bed.spawn(1, command, stdout=subprocess.PIPE)
    assert receiver.stdout.readline() == "listening\n"
    bed.spawn(0, [sys.executable, STREAMS, "send", bed.address(1, 0), "7100", str(2 * NUM_BYTES)])
    seconds = 8 * NUM_BYTES / RATE
    start, before = time.monotonic(), bed.counters(1, 0).received_bytes
    while bed.counters(1, 0).received_bytes - before < NUM_BYTES:
        time.sleep(0.002)
    first = time.monotonic() - start
    bed.set_rate(0, 0, 2 * RATE)
    bed.set_rate(1, 0, "400mbit")
    receiver.communicate(timeout=20)
    second = time.monotonic() - start - first
    bed.set_rate(0, 0, RATE)
    bed.set_rate(1, 0, RATE)
    assert 0.45 * seconds <= second <= 0.75 * seconds


def test_a_rail_goes_down_and_up(bed):
    bed.set_link(1, 1, up=False)
    code = f"import socket; socket.create_connection(({bed.address(1, 1)!r}, 7), 0.3)"
    assert "timed out" in bed.spawn(0, [sys.executable, "-c", code], stderr=subprocess.PIPE).communicate(timeout=20)[1]
    (rate,) = exchange(bed, ((0, 0), (1, 0)), num_bytes=NUM_BYTES // 4)
    assert rate > 0.9 * RATE  # the other rail
    bed.set_link(1, 1, up=True)
    (rate,) = exchange(bed, ((0, 1), (1, 1)), num_bytes=NUM_BYTES // 4)
    assert rate > 0.9 * RATE


def test_ranks_of_a_host_have_a_rail_each_and_an_unlimited_link():
    with Testbed(2, 2, RATE, ranks_per_host=2) as bed:
        command = [sys.executable, STREAMS, "receive", bed.address(0, 1), "7000"]
        receiver = bed.spawn(0, command, local_rank=1, stdout=subprocess.PIPE)
        assert receiver.stdout.readline() == "listening\n"
        bed.spawn(0, [sys.executable, STREAMS, "send", bed.address(0, 1), "7000", str(NUM_BYTES)])
        result = json.loads(receiver.communicate(timeout=20)[0])
        assert 8 * result["bytes"] / result["seconds"] > 3 * RATE
        assert bed.counters(0, 0).sent_bytes < NUM_BYTES / 100


def test_a_job_has_the_variables_of_torchrun(tmp_path):
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR GLOO_SOCKET_IFNAME"
    script = f'for name in {names}; do printenv $name; done > "{tmp_path}/$RANK"; test $RANK != 2 || exit 7'
    with Testbed(2, 4, RATE, ranks_per_host=2) as bed:
        assert run_job(bed, ["sh", "-c", script]) == 7
    assert [(tmp_path / str(rank)).read_text().split() for rank in range(4)] == [
        ["0", "4", "0", "2", "10.200.0.1", "rail0"],
        ["1", "4", "1", "2", "10.200.0.1", "rail2"],
        ["2", "4", "0", "2", "10.200.0.1", "rail0"],
        ["3", "4", "1", "2", "10.200.0.1", "rail2"],
    ]


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_nothing_is_left_after_sigkill():
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        sleeper, keeper = map(int, owner.stdout.readline().split())
        network = os.stat(f"/proc/{sleeper}/ns/net").st_ino
        assert network in namespaces_of_processes()
        owner.kill()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and (is_alive(sleeper) or is_alive(keeper)):
        time.sleep(0.02)
    assert not is_alive(sleeper)
    assert not is_alive(keeper)
    assert network not in namespaces_of_processes()


def test_a_keeper_that_dies_is_reported():
    with Testbed(1, 1, RATE) as bed:
        process = bed.spawn(0, ["sleep", "60"])
        bed._keeper.kill()
        with pytest.raises(TestbedError, match=r"keeper.* has died"):
            bed.counters(0, 0)
    assert process.returncode is not None


def namespaces_of_processes() -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(path.stat().st_ino)
        except OSError:
            pass
    return found


def test_closing_ends_the_processes():
    with Testbed(1, 1, RATE) as bed:
        process = bed.spawn(0, ["sh", "-c", "echo is there; exec sleep 60"], stdout=subprocess.PIPE)
        assert process.stdout.readline() == "is there\n"  # one that has not entered yet refuses to, with 127
    process.stdout.close()
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(TestbedError, match="closed"):
        bed.set_rate(0, 0, RATE)


def test_boards_of_killed_workers_are_removed():
    register = (
        "from fusco.rails.board import Board, NamedRail; import time; board = Board();"
        "board.register(0, 1, [NamedRail('rail0', 0)]); print(board.path, flush=True); time.sleep(60)"
    )
    with Testbed(2, 1, "1gbit") as bed:
        workers = [bed.spawn(host, [sys.executable, "-c", register], stdout=subprocess.PIPE) for host in range(2)]
        boards = [Path(worker.stdout.readline().strip()) for worker in workers]
        assert all(board.exists() for board in boards)
    assert not any(board.exists() for board in boards)


def test_entering_a_closed_testbed_is_refused():
    with Testbed(1, 1, RATE) as bed:
        namespaces = pickle.loads(pickle.dumps(bed.namespaces(0)))
    assert isinstance(namespaces, Namespaces)
    with pytest.raises(FileNotFoundError):
        namespaces.enter()


WITHOUT_ROOT = """
import subprocess, sys
from fusco.testbed import Testbed
with Testbed(2, 2, "1gbit", ranks_per_host=2) as bed:
    assert bed.namespaces(0).user
    bed.set_rate(0, 1, "2gbit")
    code = "import os, socket; print(os.getuid(), socket.gethostname())"
    print(bed.spawn(1, [sys.executable, "-c", code], stdout=subprocess.PIPE).communicate()[0])
"""


def test_without_root_by_user_namespaces():
    drop = f"import ctypes; ctypes.CDLL(None).prctl({PR_CAPBSET_DROP}, {CAP_SYS_ADMIN}, 0, 0, 0)"
    script = f"{drop}\nimport os, sys\nos.execv(sys.executable, [sys.executable, '-c', {WITHOUT_ROOT!r}])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    if "user namespaces, which this system forbids" in result.stderr:
        pytest.skip(result.stderr.splitlines()[-1])
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["0", "host1"]


def test_a_message_where_namespaces_are_forbidden():
    forbid = (
        "from fusco.testbed.namespaces import become_root\nbecome_root()\n"
        "for kind in ('net', 'user'):\n    open(f'/proc/sys/user/max_{kind}_namespaces', 'w').write('0')\n"
    )
    script = f"{forbid}from fusco.testbed import Testbed\nTestbed(1, 1, '1gbit')"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert "TestbedError: a testbed needs root" in result.stderr
    assert "user.max_user_namespaces" in result.stderr


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 1, "1gbit"), "hosts: 0 is not in 1 to 250"),
        ((1, 251, "1gbit"), "rails: 251"),
        ((1, 1, "1 potato"), "'1 potato' is not a rate"),
        ((1, 1, 10), "bit/s of a rail: 10 is not in"),
    ],
)
def test_impossible_shapes(shape, message):
    with pytest.raises(ValueError, match=message):
        Testbed(*shape)


def test_ranks_that_do_not_divide_the_rails(bed):
    with pytest.raises(ValueError, match="3 rails of a host do not divide among 2 ranks"):
        Testbed(1, 3, RATE, ranks_per_host=2)
    with pytest.raises(ValueError, match="host 3, rail 0: this testbed has hosts 0 to 2 and rails 0 to 1"):
        bed.address(3)
    for local_rank in (-1, 1):
        with pytest.raises(ValueError, match=f"local rank {local_rank}: a host of this testbed has 1"):
            bed.namespaces(0, local_rank)
