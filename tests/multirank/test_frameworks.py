"""Layers of frameworks, and CollectiveX's oracle, on fusco, unchanged; skipped where they are not installed."""

from __future__ import annotations

import importlib.util
import os
import re

import collectivex_jobs
import framework_jobs as jobs
import model_folder_jobs
import pytest
import sglang_jobs
import sglang_layer_jobs
import sglang_v2_jobs
import torch
import vllm_jobs
from on_device import skip_without_gpus

from fusco import Quantize
from fusco.bench.ranks.emulation import emulated_network
from fusco.bench.ranks.failures import RankFailedError
from fusco.bench.ranks.local_world import LocalWorld
from fusco.core.topology import Topology

pytestmark = pytest.mark.multirank
FLOAT, BF16 = torch.float32, torch.bfloat16
BOUND = {("cpu", FLOAT): 5e-7, ("cuda", FLOAT): 2e-6, ("cpu", BF16): 2e-2, ("cuda", BF16): 2e-2}


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skip a test unless all these modules are installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (tests/frameworks.txt)")


@pytest.fixture(scope="module")
def pair(world_of):
    """Two ranks of their own, as frameworks keep state in the process; and their device."""
    device = world_of.removesuffix("-nodes")
    if device == "cuda":
        skip_without_gpus(2)
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    hosts = emulated_network(Topology.of_equal_nodes(2, 2), os.environ, gpus)
    with LocalWorld(2, device, environment=hosts) as world:
        yield world, device


@needs("megatron")
@pytest.mark.parametrize(
    ("dtype", "backend", "recompute"),
    [
        (BF16, "deepep", False),
        (FLOAT, "hybridep", True),
        (FLOAT, "spec", False),
    ],
)
def test_megatrons_layer_equals_a_dense_one_while_tokens_grow(pair, dtype, backend, recompute):
    world, device = pair
    for errors in world.run(jobs.megatron_layer, 2, device, dtype, backend, recompute):
        assert max(errors) < BOUND[device, dtype], errors


@needs("nemo_automodel")
@pytest.mark.parametrize("dtype", [FLOAT, BF16])
def test_automodels_two_backends_agree_bit_for_bit(pair, dtype):
    world, device = pair
    for deep_ep, *others in world.run(jobs.automodel_layers, 2, device, dtype):
        assert len(others) == 2
        for other in others:
            for first, second in zip(deep_ep, other, strict=True):
                assert torch.equal(first, second)


@needs("torchtitan", "triton")
@pytest.mark.cpu_only
def test_torchtitans_rows_are_the_same_bits(pair):
    for (rows, counts, *rest), (our_rows, our_counts, *ours) in pair[0].run(jobs.torchtitan_dispatchers, 2):
        assert torch.equal(rows, our_rows)
        assert torch.equal(counts, our_counts)
        for first, second in zip(rest, ours, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


@needs("vllm")
@pytest.mark.cpu_only
def test_vllms_kernel_equals_a_dense_layer_with_its_own_deep_ep_class_and_with_fuscos(pair):
    for errors in pair[0].run(vllm_jobs.kernels, 2):
        if isinstance(errors, str):
            pytest.skip(f"vLLM cannot be imported: {errors}")
        ways = ["DeepEPHTPrepareAndFinalize", "DeepEPLLPrepareAndFinalize"]
        ways += ["FuscoPrepareAndFinalize", "FuscoBatchedPrepareAndFinalize"]
        assert list(errors) == [f"{way}, {dtype}" for way in ways for dtype in ("bfloat16", "FP8")]
        assert max(map(max, errors.values())) < BOUND["cpu", BF16], errors


@needs("vllm", "safetensors")
@pytest.mark.cpu_only
def test_vllms_fp8_layer_of_a_models_folder_gives_what_one_rank_gives(pair, tmp_path):
    model_folder_jobs.write_folder(tmp_path)
    for errors in pair[0].run(model_folder_jobs.layers, 2, tmp_path):
        if isinstance(errors, str):
            pytest.skip(f"vLLM cannot be imported: {errors}")
        assert list(errors) == ["allgather_reducescatter", "deepep_low_latency"]
        assert max(map(max, errors.values())) < BOUND["cpu", BF16], errors


@needs("sglang")
@pytest.mark.cpu_only
@pytest.mark.parametrize("is_fp8", [False, True], ids=["bfloat16", "FP8"])
@pytest.mark.parametrize("mode", ["NORMAL", "LOW_LATENCY", "AUTO"])
def test_sglangs_dispatcher_equals_a_dense_layer(pair, mode, is_fp8):
    for errors in pair[0].run(sglang_jobs.dispatcher_layers, 2, mode, is_fp8=is_fp8):
        if isinstance(errors, str):
            pytest.skip(errors)
        assert len(errors) == (8 if mode == "AUTO" else 3)
        assert max(errors) < BOUND["cpu", BF16], errors


@needs("sglang")
@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("kind", "is_expanded"), [(None, False), (Quantize(), True), (Quantize(scale="ue8m0", layout="tma"), True)]
)
def test_sglangs_classes_for_deep_eps_second_version_equal_a_dense_layer(pair, kind, is_expanded):
    for errors in pair[0].run(sglang_v2_jobs.layers, 2, kind, is_expanded=is_expanded):
        if isinstance(errors, str):
            pytest.skip(errors)
        assert len(errors) == 6
        assert max(errors) < BOUND["cpu", BF16], errors


@needs("sglang", "safetensors")
@pytest.mark.cpu_only
def test_sglangs_fp8_layer_of_a_models_folder_gives_what_one_rank_gives(pair, tmp_path):
    model_folder_jobs.write_folder(tmp_path)
    for errors in pair[0].run(sglang_layer_jobs.layers, 2, tmp_path):
        if isinstance(errors, str):
            pytest.skip(errors)
        assert list(errors) == ["deepep", "deepep_v2"]
        assert [len(each) for each in errors.values()] == [len(sglang_layer_jobs.STEPS)] * 2
        assert max(map(max, errors.values())) < BOUND["cpu", BF16], errors


@needs("ep_harness")
@pytest.mark.parametrize(
    ("mode", "precision", "ranks_per_node"),
    [("normal", "bf16", 2), ("normal", "fp8", 1), ("low-latency", "fp8", 2), ("low-latency", "bf16", 1)],
)
def test_collectivexs_oracle_passes(pair, mode, precision, ranks_per_node):
    world, device = pair
    for reports in world.run(collectivex_jobs.oracle_reports, 2, device, mode, precision, ranks_per_node):
        assert len(reports) == 3
        for report in reports:
            assert all(report["checks"].values()), report


@needs("megatron")
def test_others_name_a_rank_that_is_killed_in_megatrons_layer(pair):
    """The last one here: the ranks are gone."""
    world, device = pair
    with pytest.raises(RankFailedError) as error:
        world.run(jobs.killed_in_megatron, 2, device)
    text = str(error.value)
    assert "PeerFailureError: rank 0 gave up in combine" in text
    assert re.search(r"Cause: rank 1 \(pid \d+\) is dead", text)
