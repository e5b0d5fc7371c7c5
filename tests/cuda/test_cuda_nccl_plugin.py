"""NCCL itself over rails: two processes as two hosts, on loopback addresses, which may share a GPU."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).with_name("nccl_rank.py"))


def run_ranks(what, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    where = json.dumps({"rails": 2, "folder": str(tmp_path)})
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, what, where],
            env={**os.environ, **shared, "RANK": str(rank), "NCCL_DEBUG": "INFO"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        return [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


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
