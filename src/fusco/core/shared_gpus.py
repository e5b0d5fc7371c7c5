"""Several ranks on one GPU, for tests with more ranks than GPUs: correct but slow, as kernels take turns."""

from __future__ import annotations

import os

# A variable of PyTorch; without it, symmetric memory raises if ranks share a GPU.
SHARE_GPUS = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def may_share_gpus() -> bool:
    """Return whether the environment lets ranks share GPUs."""
    return os.environ.get(SHARE_GPUS) == "1"
