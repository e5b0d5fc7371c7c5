"""Comparisons of outputs with expected values, and rows to be summed."""

from __future__ import annotations

import torch

from generator import values
from law import Law


def assert_same_bits(seen: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Assert equal dtype, shape and bits; a NaN equals itself."""
    assert seen.dtype == expected.dtype, f"{what}: {seen.dtype}, expected {expected.dtype}"
    assert seen.shape == expected.shape, f"{what}: shape {tuple(seen.shape)}, expected {tuple(expected.shape)}"
    seen_bytes, expected_bytes = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (seen, expected))
    if not torch.equal(seen_bytes, expected_bytes):
        rows = (seen_bytes != expected_bytes).view(len(seen), -1).any(dim=1).nonzero().squeeze(1).tolist()
        raise AssertionError(f"{what}: rows {rows} of {len(seen)} differ")


def assert_within(seen: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor, what: str) -> None:
    """Assert that each element differs from the expected one by at most its bound."""
    assert seen.shape == expected.shape, f"{what}: shape {tuple(seen.shape)}, expected {tuple(expected.shape)}"
    error = (seen.double() - expected).abs()
    is_wrong = ~(error <= bound)  # a NaN is wrong, too
    if is_wrong.any():
        rows = is_wrong.any(dim=1).nonzero().squeeze(1).tolist()
        excess = (error / bound)[is_wrong].max()
        raise AssertionError(f"{what}: rows {rows} of {len(seen)} are off by up to {excess:.3g} times the bound")


def largest_error(seen: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of two elements; infinity if one is NaN, which ``max`` of floats passes over."""
    errors = (seen.detach().cpu().double() - expected.detach().cpu().double()).abs()
    return float(errors.max().nan_to_num(nan=torch.inf)) if errors.numel() else 0.0


def world_rows(law: Law, hidden: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Expert-major rows of every rank, as experts might return them. Padding is NaN: combine must not read it."""
    world = []
    for rank in law.ranks:
        slots = law.slots(rank)
        rows = values((len(slots), hidden), dtype, seed, "y", rank)
        rows[[slot for slot, pair in enumerate(slots) if pair is None]] = float("nan")
        world.append(rows)
    return world
