"""One world of rank processes for all tests, since starting one takes seconds."""

import importlib.util
import os
import sys
from multiprocessing import forkserver

import pytest
import torch
from limited_world import limited_world
from on_device import DeviceWorld, use_network_only
from rank_setup import no_op

from fusco.bench.ranks.local_world import PRELOADED, LocalWorld
from fusco.core.environment import may_share_gpus

# Not searched for doctests if their imports are missing; their tests are skipped with a message.
_MODULE_TO_JOBS = {"transformers": "fsdp_*.py", "peft": "fsdp_adapter_jobs.py"}
collect_ignore_glob = [jobs for module, jobs in _MODULE_TO_JOBS.items() if not importlib.util.find_spec(module)]

# Transformers imports the code of a model when the first is made, which takes each rank half a second.
_MODELS = [f"transformers.models.{name}.modeling_{name}" for name in ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")]
PRELOADED.extend(["fsdp_jobs", *_MODELS, "compiled_kernels", "frozen"])

SIZES = (8, 6, 4, 2, 1)  # of the groups that tests use


@pytest.fixture(scope="session", autouse=True)
def fork_server(world_of):
    """The process that ranks are forked from: it imports once what all of them need, if it is installed.

    Before Python 3.12 its ``sys.path`` is that of a new interpreter, and it skips modules that it does not find.
    """
    if world_of == "cpu":
        forkserver.set_forkserver_preload(PRELOADED)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
            forkserver.ensure_running()


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
def one(world_of):
    world = limited_world(world_of, 1)
    yield world
    world.close()


@pytest.fixture(scope="session")
def eight(world_of):
    world = limited_world(world_of, 8)
    yield world
    world.close()
