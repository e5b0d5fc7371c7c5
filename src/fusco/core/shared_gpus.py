"""Several ranks on one GPU, for tests of more ranks than GPUs: right but slow, as kernels wait for their turns."""

from __future__ import annotations

import os

# PyTorch's, without which its symmetric memory refuses.
SHARE_GPUS = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def may_share_gpus() -> bool:
    """Whether the environment lets ranks share GPUs."""
    return os.environ.get(SHARE_GPUS) == "1"
