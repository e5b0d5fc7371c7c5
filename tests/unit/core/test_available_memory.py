"""Memory that can be allocated without swapping, as Linux estimates it."""

from __future__ import annotations

import os

import pytest

from fusco.core.memory_size import available_memory_bytes

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("meminfo", "num_bytes"),
    [
        ("MemTotal:       16384 kB\nMemFree:  2 kB\nMemAvailable:    8192 kB\n", 8192 * 1024),
        ("MemTotal:       16384 kB\nMemFree:  2 kB\n", PHYSICAL),
    ],
)
def test_linux_estimate_or_else_all_physical_memory(tmp_path, monkeypatch, meminfo, num_bytes):
    table = tmp_path / "meminfo"
    table.write_text(meminfo, encoding="utf-8")
    monkeypatch.setattr("fusco.core.memory_size._MEMINFO", table)
    assert available_memory_bytes() == num_bytes


def test_this_machine_has_some():
    assert 0 < available_memory_bytes() <= PHYSICAL
