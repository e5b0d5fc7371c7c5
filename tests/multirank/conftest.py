"""One world of rank processes for all tests: starting them costs seconds."""

import pytest
from rank_setup import meet

from fusco.bench.local_world import LocalWorld


@pytest.fixture(scope="session")
def world():
    with LocalWorld(8) as world:
        # The largest group first: PyTorch names groups by how many each process knows already (pytorch issue 173608).
        for num_ranks in (8, 6, 4, 2, 1):
            world.run(meet, num_ranks)
        yield world
