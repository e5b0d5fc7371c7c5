"""A world whose ranks are replaced if they hang or fail."""

import pytest
import torch

from fusco.bench.local_world import LocalWorld


class LimitedWorld:
    """A ``LocalWorld`` where whatever takes too long has failed. Ranks that failed are replaced for the next test.

    On CUDA each rank has a GPU of its own; tests are skipped if there are fewer.
    """

    def __init__(self, world_size, meet, limit_s, device="cpu"):
        self._world_size, self._meet, self._limit_s, self.device = world_size, meet, limit_s, device
        self._world = None

    def run(self, function, *args, **kwargs):
        if self.device == "cuda" and torch.cuda.device_count() < self._world_size:
            pytest.skip(f"{self._world_size} ranks need as many GPUs, here are {torch.cuda.device_count()}")
        if self._world is None:
            self._world = LocalWorld(self._world_size, self.device)
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
