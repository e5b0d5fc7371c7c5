"""Random states go on where they were, through a file that holds plain values only."""

import random

import numpy as np
import torch

from fusco.fsdp.run_state import random_state, set_random_state


def draw():
    return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(2).tolist()  # noqa: NPY002


def test_the_same_numbers_are_drawn_again(tmp_path):
    random.gauss(0, 1)  # keeps the second of two
    torch.save(random_state(), tmp_path / "state.pt")
    drawn = draw()
    assert draw() != drawn
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draw() == drawn
