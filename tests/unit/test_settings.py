"""Settings and capacities out of range."""

import dataclasses

import pytest
import torch

from fusco import Capacity, Settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slice_bytes", 0),
        ("slice_bytes", -1),
        ("ring_depth", 1),
        ("timeout_s", 0.0),
        ("timeout_s", -1.0),
        ("timeout_s", float("nan")),
        ("wire_dtype", torch.int32),
        ("wire_dtype", torch.bfloat16),
    ],
)
def test_bad_settings_are_refused_with_their_value(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
        Settings(**{name: value})


@pytest.mark.parametrize("wire_dtype", [None, torch.float32])
def test_good_settings(wire_dtype):
    assert Settings(slice_bytes=1, ring_depth=2, timeout_s=0.1, wire_dtype=wire_dtype).wire_dtype == wire_dtype


def test_settings_are_frozen_and_by_name():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().timeout_s = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        Settings(1024)  # type: ignore[misc]


@pytest.mark.parametrize("name", ["max_tokens_per_rank", "max_bytes_per_token", "num_topk"])
def test_capacities_must_be_positive(name):
    sizes = {"max_tokens_per_rank": 1, "max_bytes_per_token": 1, "num_topk": 1}
    assert Capacity(**sizes).max_row_bytes == 8  # room for the gradient of one weight
    with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
        Capacity(**{**sizes, name: 0})
