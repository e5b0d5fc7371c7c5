"""Gradients through dispatch, experts and combine, compared with central differences and with a layer without fusco."""

from __future__ import annotations

import dataclasses

import gradient_jobs as jobs
import pytest
import torch
from gradient_jobs import Layer
from rank_setup import Setup

from fusco import Launch, Settings
from generator import KINDS

pytestmark = pytest.mark.multirank

SETTINGS = Settings(timeout_s=60.0, slice_bytes=1)
SETUP = Setup(ranks_per_node=2, num_experts=8, num_topk=3, max_tokens=16, balancer="scattered", settings=SETTINGS)
LAYERS = {
    "weights in combine": Layer(),
    "weights at the experts": Layer(weighted_by="experts", alignment=4),
    "no weights": Layer(weighted_by="none", wants=("x",)),
    "x only": Layer(wants=("x",), alignment=3),
    "x only, weights at the experts": Layer(weighted_by="experts", wants=("x",)),
    "weights only": Layer(wants=("weights",)),
    "weights only, at the experts": Layer(weighted_by="experts", wants=("weights",), alignment=2),
}


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(4, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("name", ["weights in combine", "weights at the experts"])
def test_gradients_are_slopes(world, num_ranks, ranks_per_node, name):
    setup = dataclasses.replace(SETUP, ranks_per_node=ranks_per_node, num_topk=2, max_tokens=2)
    kinds = ["balanced", "a rank without tokens", "repeated experts", "ragged with holes"]
    cases = [setup.case(kind, seed, num_ranks, num_topk=2) for seed, kind in enumerate(kinds)]
    differences = world.run(jobs.differences_from_slopes, num_ranks, setup, LAYERS[name], cases)
    assert max(differences) < 1e-8  # losses of about 10, in steps of 1e-5: differences are good to about 1e-10


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_a_layer_alone(world, name):
    differences = world.run(jobs.differences_from_a_layer_alone, 4, SETUP, LAYERS[name], KINDS)
    assert all(difference < 1e-13 for rank in differences for difference in rank.values())


# A few roundings to 24, 8 and 11 bits, here as in the layer alone: measured 1.3e-7, 0.0065 and 0.00096.
@pytest.mark.parametrize(
    ("dtype", "weights_dtype", "tolerance", "name"),
    [
        (torch.float32, None, 5e-7, "weights in combine"),
        (torch.bfloat16, None, 0.02, "weights at the experts"),
        (torch.float16, None, 0.003, "weights in combine"),
        (torch.bfloat16, torch.float32, 0.02, "weights in combine"),
        (torch.float32, torch.float64, 5e-7, "weights at the experts"),
        (torch.float64, torch.float32, 5e-7, "weights at the experts"),
    ],
)
def test_gradients_of_other_dtypes(world, dtype, weights_dtype, tolerance, name):
    layer = dataclasses.replace(LAYERS[name], dtype=dtype, weights_dtype=weights_dtype)
    differences = world.run(jobs.differences_from_a_layer_alone, 4, SETUP, layer, KINDS)
    assert all(difference < tolerance for rank in differences for difference in rank.values())


def test_graphs(world):
    world.run(jobs.check_graphs, 4, SETUP)


@pytest.mark.cpu_only
def test_gradients_are_launched_as_what_they_mirror_but_on_the_callers_stream(world):
    for seen in world.run(jobs.launches_of_gradients, 2, SETUP):
        dispatch, combine, again = (Launch(num_sms=num_sms) for num_sms in (1, 2, 3))
        assert seen == [
            ("combine", again),
            ("dispatch_again", combine),
            ("combine", combine),  # gradients of weights
            ("combine", dispatch),
        ]
