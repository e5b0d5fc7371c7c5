"""One world of rank processes for all tests, since starting one takes seconds."""

import importlib.util

import pytest
import torch
from limited_world import limited_world
from on_device import DeviceWorld, use_network_only
from rank_setup import no_op

from fusco.core.shared_gpus import may_share_gpus
from fusco.ranks.local_world import PRELOADED, LocalWorld

# Not searched for doctests if their imports are missing; their tests are skipped with a message.
collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["fsdp_*.py"]

# Imported once, before any rank is forked; modules that are not installed are left out.
PRELOADED.extend(["fsdp_jobs", "compiled_kernels"])

SIZES = (8, 6, 4, 2, 1)  # of the groups that tests use


@pytest.fixture(scope="session")
def world_of(request):
    """``"cpu"``, ``"cuda"`` or ``"cuda-nodes"``."""
    return request.config.getoption("--device")


@pytest.fixture(scope="session")
def world(world_of):
    device = world_of.removesuffix("-nodes")
    num_ranks = SIZES[0] if device == "cpu" or may_share_gpus() else min(SIZES[0], torch.cuda.device_count())
    with LocalWorld(num_ranks, device) as world:
        # The largest group first: PyTorch names a group by the number of groups in the process (pytorch issue 173608).
        for size in SIZES:
            if size <= num_ranks:
                world.run(no_op, size)
        if world_of == "cuda-nodes":
            world.run(use_network_only, num_ranks)
        yield world if device == "cpu" else DeviceWorld(world, in_nodes=world_of == "cuda-nodes")


@pytest.fixture(scope="session")
def four(world_of):
    world = limited_world(world_of, 4)
    yield world
    world.close()


@pytest.fixture(scope="session")
def two(world_of):
    world = limited_world(world_of, 2)
    yield world
    world.close()


@pytest.fixture(scope="session")
def eight(world_of):
    world = limited_world(world_of, 8)
    yield world
    world.close()
