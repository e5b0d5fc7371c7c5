"""Shared memory of ranks has no name, and only its owner reads it."""

import os
import subprocess
import time
from pathlib import Path

import pytest
from fault_jobs import hold_open, open_files
from struck_worlds import shared_names, world_with_victims

pytestmark = [pytest.mark.multirank, pytest.mark.alone, pytest.mark.cpu_only, pytest.mark.timeout(60)]


def test_shared_memory_has_no_name_and_only_its_owner_reads_it(tmp_path):
    names_before = shared_names()
    with world_with_victims(2) as world:
        world.start(hold_open, 2, 2, tmp_path)
        while len(list(tmp_path.glob("open on *"))) < len(world.processes):
            time.sleep(0.05)
        shared = [shared_memory_of(process.pid) for process in world.processes]
        entries = [entry for of_rank in shared for entry in of_rank]
        states = [entry.stat() for entry in entries]
        others_can_read = [can_another_user_read(entry) for entry in entries]
        assert shared_names() <= names_before
        (tmp_path / "seen").touch()
        assert all(shared)
        assert all(held for _, held in world.collect(range(2)))
    assert {state.st_nlink for state in states} == {0}
    assert {state.st_uid for state in states} == {os.getuid()}
    assert {state.st_mode & 0o777 for state in states} == {0o600}
    assert not any(others_can_read)


def shared_memory_of(pid) -> list[Path]:
    return [entry for entry, name in open_files(pid) if name.startswith("/dev/shm/")]


def can_another_user_read(path) -> bool:
    if os.getuid() != 0:
        return False  # only root can become another user; the mode is compared in any case
    read = subprocess.run(["head", "-c1", path], check=False, user=65534, group=65534, extra_groups=[])
    return read.returncode == 0
