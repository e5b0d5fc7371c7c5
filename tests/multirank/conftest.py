"""One world of rank processes for all tests: starting them costs seconds."""

import pytest
from on_device import DeviceWorld
from rank_setup import meet

from fusco.bench.local_world import LocalWorld


@pytest.fixture(scope="session")
def world(request):
    device = request.config.getoption("--device")
    with LocalWorld(8, device) as world:
        # The largest group first: PyTorch names groups by how many each process knows already (pytorch issue 173608).
        for num_ranks in (8, 6, 4, 2, 1):
            world.run(meet, num_ranks)
        yield world if device == "cpu" else DeviceWorld(world)
