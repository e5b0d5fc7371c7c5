"""Layers of Megatron-core, Automodel and torchtitan on fusco, unchanged; skipped where they are not installed."""

from __future__ import annotations

import importlib.util

import framework_jobs as jobs
import pytest
import torch

from fusco.ranks.local_world import LocalWorld

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skip a test unless all these modules are installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (tests/frameworks.txt)")


@pytest.fixture(scope="module")
def pair():
    """Two ranks of their own: frameworks keep state in the process."""
    with LocalWorld(2) as world:
        yield world


@needs("megatron")
@pytest.mark.parametrize(("backend", "recompute"), [("deepep", False), ("hybridep", False), ("hybridep", True)])
def test_megatrons_layer_equals_a_dense_one_while_tokens_grow(pair, backend, recompute):
    for errors in pair.run(jobs.megatron_layer, 2, backend, recompute):
        assert max(errors) < 1e-6, errors


@needs("nemo_automodel")
def test_automodels_two_backends_agree_bit_for_bit(pair):
    for deep_ep, hybrid_ep in pair.run(jobs.automodel_layers, 2):
        for first, second in zip(deep_ep, hybrid_ep, strict=True):
            assert torch.equal(first, second)
        assert deep_ep[0].abs().max() > 0


@needs("torchtitan", "triton")
def test_torchtitans_rows_are_the_same_bits(pair):
    for (rows, counts, *rest), (our_rows, our_counts, *ours) in pair.run(jobs.torchtitan_dispatchers, 2):
        assert torch.equal(rows, our_rows)
        assert torch.equal(counts, our_counts)
        for first, second in zip(rest, ours, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)
