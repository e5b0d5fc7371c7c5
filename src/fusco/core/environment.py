"""Variables of the environment that say which GPUs and NICs ranks use."""

from __future__ import annotations

import os
from collections.abc import Mapping

RAILS_VARIABLE = "FUSCO_RAILS"
ALL_RAILS = "all"  # its value for all interfaces that are up and have an address


def rail_names(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the interfaces that ``FUSCO_RAILS`` names, with commas between them; none if it is not set.

    >>> rail_names({"FUSCO_RAILS": "eth0, eth1"}), rail_names({})
    (('eth0', 'eth1'), ())
    """
    names = (os.environ if environment is None else environment).get(RAILS_VARIABLE, "")
    return tuple(name.strip() for name in names.split(",") if name.strip())


# A variable of PyTorch; without it, symmetric memory raises if ranks share a GPU.
SHARE_GPUS = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def may_share_gpus() -> bool:
    """Return whether the environment lets ranks share GPUs."""
    return os.environ.get(SHARE_GPUS) == "1"
