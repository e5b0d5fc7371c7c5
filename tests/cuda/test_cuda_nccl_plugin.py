"""NCCL itself over rails: two processes as two hosts, on loopback addresses, which may share a GPU."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).with_name("nccl_rank.py"))


def run_ranks(what, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    where = json.dumps({"rails": 2, "folder": str(tmp_path)})
    logs = [tmp_path / f"rank-{rank}.log" for rank in (0, 1)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as output:
            env = {**os.environ, **shared, "RANK": str(rank), "NCCL_DEBUG": "INFO"}
            command = [sys.executable, PROGRAM, what, where]
            ranks.append(subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + 120
    for rank in ranks:
        with suppress(subprocess.TimeoutExpired):  # its log says what it waited for
            rank.wait(max(0.0, deadline - time.monotonic()))
        rank.kill()
    return [log.read_text() for log in logs]


@pytest.mark.cuda
def test_collectives_are_right_and_take_all_rails(device, tmp_path):
    for output in run_ranks("check", tmp_path):
        assert "bit-equal" in output, output[-3000:]
        assert "Using network fusco" in output
        rails = json.loads(output.rpartition("over each rail: ")[2].splitlines()[0])
        assert min(rails) > 10


@pytest.mark.cuda
def test_a_killed_peer_is_named(device, tmp_path):
    assert "PeerFailureError: rank 0 gave up" in run_ranks("kill", tmp_path)[0]
