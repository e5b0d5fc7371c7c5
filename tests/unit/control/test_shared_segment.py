"""Shared memory without a name, for its owner only."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import pytest
import torch

from fusco import SharedMemoryError
from fusco.control.shared_segment import SHARED_MEMORY_DIR, SegmentAddress, SharedSegment


def test_a_peer_sees_what_the_owner_writes_and_the_other_way_round():
    with SharedSegment.create(5000) as own, SharedSegment.open_peer(own.address) as peer:
        assert own.memory.dtype == torch.uint8
        assert own.memory.tolist() == [0] * 5000
        own.memory[4999], peer.memory[0] = 3, 4
        assert (peer.memory[4999], own.memory[0]) == (3, 4)


def test_only_its_owner_may_open_it_and_it_has_no_name():
    before = sorted(os.listdir(SHARED_MEMORY_DIR))
    with SharedSegment.create(4096) as segment:
        status = os.fstat(segment.address.fd)
        assert status.st_mode & 0o777 == 0o600
        assert status.st_nlink == 0
        assert sorted(os.listdir(SHARED_MEMORY_DIR)) == before
        assert not os.get_inheritable(segment.address.fd)
    assert sorted(os.listdir(SHARED_MEMORY_DIR)) == before


def test_all_its_memory_is_reserved():
    with SharedSegment.create(3 << 20) as segment:
        status = os.fstat(segment.address.fd)
        assert status.st_size == 3 << 20
        assert status.st_blocks * 512 >= 3 << 20


def test_memory_is_reserved_in_calls_that_end_between_the_signals_of_a_timer(monkeypatch):
    """Kernels that let any signal interrupt a call undo all of it, so a call for a large segment would never end."""
    calls, reserve = [], os.posix_fallocate

    def reserve_if_quick(fd, first, num_bytes):
        assert num_bytes <= 4 << 20, "a signal comes meanwhile, each time"
        reserve(fd, first, num_bytes)
        calls.append((first, num_bytes))

    monkeypatch.setattr(os, "posix_fallocate", reserve_if_quick)
    with SharedSegment.create((9 << 20) + 5) as segment:
        assert os.fstat(segment.address.fd).st_size == (9 << 20) + 5
        assert os.fstat(segment.address.fd).st_blocks * 512 >= 9 << 20
    assert [first for first, _ in calls[1:]] == [first + num_bytes for first, num_bytes in calls[:-1]]


@pytest.mark.parametrize(("num_bytes", "num_ranks"), [(1 << 50, 1), (1 << 42, 256)])
def test_too_large_a_segment_says_what_is_needed_and_what_is_free(num_bytes, num_ranks):
    with pytest.raises(SharedMemoryError) as caught:
        SharedSegment.create(num_bytes, num_ranks)
    needed, free = re.search(r"need ([\d,]+) bytes .* room for ([\d,]+);", str(caught.value)).groups()
    assert int(needed.replace(",", "")) == num_bytes
    room = os.statvfs(SHARED_MEMORY_DIR)
    assert 0 < int(free.replace(",", "")) <= room.f_blocks * room.f_frsize
    assert f"{num_ranks} rank(s)" in str(caught.value)


def test_room_is_checked_for_all_ranks_of_the_machine_together():
    room = os.statvfs(SHARED_MEMORY_DIR)
    with pytest.raises(SharedMemoryError, match=r"4 rank\(s\)"):
        SharedSegment.create(room.f_bavail * room.f_frsize // 3, num_ranks=4)


def test_private_memory_of_all_ranks_is_counted():
    private_bytes = 1 << 50
    with pytest.raises(
        SharedMemoryError, match=rf"2 rank\(s\) .* {private_bytes:,} of private memory each, but it has"
    ):
        SharedSegment.create(4096, num_ranks=2, private_bytes=private_bytes)


def test_a_peer_that_is_gone():
    with SharedSegment.create(4096) as segment:
        address = segment.address
    with pytest.raises(SharedMemoryError, match=rf"/proc/{address.pid}/fd/{address.fd} .*ranks_per_node=1"):
        SharedSegment.open_peer(SegmentAddress(address.pid, address.fd, 4096))


def test_a_peer_that_has_closed_it_and_has_another_file_in_its_place(tmp_path):
    with (tmp_path / "another").open("w+b") as another:
        address = SegmentAddress(os.getpid(), another.fileno(), 4096)
        with pytest.raises(SharedMemoryError, match="the peer has closed it"):
            SharedSegment.open_peer(address)


def test_an_error_names_the_limit_of_the_address_space():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), limits[1]))
    try:
        with pytest.raises(SharedMemoryError) as raised:
            SharedSegment.create(64 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert re.match(
        r"67,108,864 bytes of shared memory were allocated, but could not be mapped: Cannot allocate memory\. This "
        r"process has a limit of [\d,]+ bytes for all that it maps \(ulimit -v\)",
        str(raised.value),
    )


def test_an_error_names_the_limit_of_open_files():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with SharedSegment.create(4096) as segment, SharedSegment.create(4096) as last:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            with pytest.raises(SharedMemoryError, match=r"/dev/shm: Too many open files; this .* 3 \(ulimit -n\)"):
                SharedSegment.create(4096)
            with pytest.raises(SharedMemoryError, match=r"peer's shared memory: Too many open files; this .* 3 \(ulim"):
                SharedSegment.open_peer(segment.address)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert last.address.fd >= 0


def test_memory_in_use_survives_closing_and_descriptors_do_not():
    before = os.listdir("/proc/self/fd")
    own = SharedSegment.create(4096)
    peer = SharedSegment.open_peer(own.address)
    row = own.memory[:8].view(torch.int64)
    own.close()
    own.close()
    row[0] = 9
    assert peer.memory[0] == 9
    assert len(own.memory) == 0
    peer.close()
    del row
    # mmap keeps a duplicate of the descriptor as long as the memory is mapped.
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 2
