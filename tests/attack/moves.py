"""Moves of experts until a rank is killed: every other rank has whole experts, all old or all new."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from fault_jobs import Fate, _error_of, held_in_the_end
from move_jobs import in_places

import fusco
from attack.configuration import Configuration
from fusco.placement.placement import warm_up_placement

_EXPERT = [(torch.uint8, (70_001,)), (torch.bfloat16, (5_000,))]
_PLACES, _LARGEST_STEP = 3, 1 << 17


def warm_up(group: dist.ProcessGroup) -> None:
    """Compile the plan, so that no rank is killed while it imports or compiles."""
    warm_up_placement()


def move_until_failure(
    group: dist.ProcessGroup, configuration: Configuration, longest_s: float, *name: int | str
) -> Fate:
    """Move experts to random places, at once or in steps, until a rank fails."""
    fate, ends_at = Fate(), time.monotonic() + longest_s
    random = np.random.default_rng([*map(ord, repr(name))])
    try:
        with configuration.setup.open(group) as comm:
            placed = _placement(random, configuration.num_ranks)
            weights = in_places(_EXPERT, placed[comm.rank], _PLACES)
            while not fate.text and time.monotonic() < ends_at:
                target = _placement(random, configuration.num_ranks)
                pace = fusco.Pace(step_bytes=int(random.integers(1000, _LARGEST_STEP)))
                try:
                    task = comm.start_moving_experts(weights, placed, target, pace=pace)
                    while not task.step():
                        pass
                except fusco.PeerFailureError as error:
                    fate.note(error)
                    fate.later_error = _error_of(lambda comm=comm: comm.shuffle({}, {}))
                    has = [_has(weights, row[comm.rank]) for row in (placed, target)]
                    assert any(has), f"half an expert on rank {comm.rank}, from {placed.tolist()} to {target.tolist()}"
                else:
                    placed = target
                    assert _has(weights, placed[comm.rank]), f"not at {placed.tolist()}"
            began_to_close = time.monotonic()
        fate.closing_s = time.monotonic() - began_to_close
    except fusco.PeerFailureError as error:
        fate.note(error)
    fate.still_held = held_in_the_end()
    return fate


def _placement(random: np.random.Generator, num_ranks: int) -> np.ndarray:
    """Return places of all experts, two for each rank, and a copy of one of them for each."""
    experts = [*range(2 * num_ranks), *random.integers(0, 2 * num_ranks, num_ranks)]
    return random.permutation(experts).reshape(num_ranks, _PLACES)


def _has(weights: Sequence[torch.Tensor], row: np.ndarray) -> bool:
    expected = in_places(_EXPERT, row, _PLACES)
    pairs = zip(weights, expected, strict=True)
    return all(torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)) for tensor, other in pairs)
