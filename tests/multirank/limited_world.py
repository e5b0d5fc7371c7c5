"""A world whose ranks are replaced if they hang or fail."""

import torch
from on_device import skip_without_gpus, use_network_only

from fusco.bench.ranks.local_world import LocalWorld


class LimitedWorld:
    """A ``LocalWorld`` with a time limit for each function. Ranks that failed are replaced for the next test.

    On CUDA each rank has one GPU, or shares one if that is permitted; tests are skipped otherwise.
    """

    def __init__(self, world_size, first, limit_s, device="cpu"):
        self._world_size, self._first, self._limit_s, self.device = world_size, first, limit_s, device
        self._world = None

    def run(self, function, *args, **kwargs):
        if self.device == "cuda":
            skip_without_gpus(self._world_size)
        if self._world is None:
            self._world = LocalWorld(self._world_size, self.device)
            if self.device == "cuda" and torch.cuda.device_count() < self._world_size:
                self._world.run(use_network_only, self._world_size)
            self._world.run(self._first, self._world_size)
        self._world.start(function, self._world_size, *args, **kwargs)
        try:
            return self._world.results(range(self._world_size), timeout_s=self._limit_s)
        except BaseException:
            self.close()
            raise

    def close(self):
        if self._world:
            # They have nothing to clean up, and interpreters with so many modules take seconds to exit.
            self._world.kill()
            self._world.close()
        self._world = None


def limited_world(world_of, num_ranks):
    """A world whose default group has exactly ``num_ranks`` ranks, as device meshes require."""
    from fsdp_runs import LIMIT_S, import_models  # noqa: PLC0415  needs transformers

    device = world_of.removesuffix("-nodes")
    # Kernels are compiled when they are first used.
    return LimitedWorld(num_ranks, import_models, LIMIT_S if device == "cpu" else 3 * LIMIT_S, device)
