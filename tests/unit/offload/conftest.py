"""A simulated host with two GPUs."""

from __future__ import annotations

import pytest
from simulated_copiers import Host


@pytest.fixture
def host(tmp_path):
    made = Host(tmp_path)
    yield made
    made.close()
