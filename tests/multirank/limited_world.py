"""A world whose ranks are replaced if they hang or fail."""

import torch
from on_device import skip_without_gpus, talk_over_network

from fusco.ranks.local_world import LocalWorld


class LimitedWorld:
    """A ``LocalWorld`` where whatever takes too long has failed. Ranks that failed are replaced for the next test.

    On CUDA each rank has a GPU of its own, or shares one if it may; tests are skipped otherwise.
    """

    def __init__(self, world_size, meet, limit_s, device="cpu"):
        self._world_size, self._meet, self._limit_s, self.device = world_size, meet, limit_s, device
        self._world = None

    def run(self, function, *args, **kwargs):
        if self.device == "cuda":
            skip_without_gpus(self._world_size)
        if self._world is None:
            self._world = LocalWorld(self._world_size, self.device)
            if self.device == "cuda" and torch.cuda.device_count() < self._world_size:
                self._world.run(talk_over_network, self._world_size)
            self._world.run(self._meet, self._world_size)
        self._world.start(function, self._world_size, *args, **kwargs)
        try:
            outcomes = self._world.collect(range(self._world_size), timeout_s=self._limit_s)
            assert all(is_ok for is_ok, _ in outcomes), outcomes
        except BaseException:
            self.close()
            raise
        return [outcome for _, outcome in outcomes]

    def close(self):
        if self._world:
            # They have nothing to put away, and interpreters that have loaded so much take seconds to leave.
            self._world.kill()
            self._world.close()
        self._world = None
