"""One rank on one GPU, in this process. Without a GPU everything here is skipped, saying so."""

import pytest
import torch
import torch.distributed as dist
from one_rank import OneRank


@pytest.fixture(scope="session")
def device():
    if not torch.cuda.is_available():
        pytest.skip(f"needs a GPU, and this torch ({torch.__version__}) finds none")
    pytest.importorskip("cuda.core", reason="needs cuda-core, which fusco[cuda] and fusco[test] install")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def group(device):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def one(group, device):
    with OneRank(group, device) as one:
        yield one
