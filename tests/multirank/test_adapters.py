"""Adapters of vLLM 0.33.0, SGLang 0.5.23, VeOmni 0.1.12, torchtitan 0.3.0 and CollectiveX, by their signatures."""

from __future__ import annotations

import time

import adapter_jobs as jobs
import collectivex_jobs
import pytest
import vllm_adapter_jobs as vllm_jobs
from frozen_frameworks import SGLangFp8Method, SGLangUnquantizedMethod

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]


@pytest.mark.parametrize(
    ("backend", "placement"), zip(vllm_jobs.BACKENDS, ("linear", "round_robin", "shuffled"), strict=True)
)
def test_vllms_kernel_computes_dense_experts(world, backend, placement):
    for errors in world.run(vllm_jobs.vllm_layers, 2, backend, placement):
        refused = ("MXFP8", "MXFP8, scales as rows") if backend == "deepep_low_latency" else ()
        assert list(errors) == [name for name in vllm_jobs.QUANTIZED if name not in refused]
        assert errors.pop("a scale of what arrives") < 0.2  # of values up to 4, in FP8
        assert max(errors.values()) < 1e-6


def test_eplb_of_vllm_moves_experts_between_steps(world):
    assert max(world.run(vllm_jobs.vllm_rebalanced, 2, 4)) < 1e-6


def test_eplb_of_sglang_moves_experts_between_steps(world):
    assert max(world.run(jobs.sglang_rebalanced, 2, 4)) < 1e-6


@pytest.mark.parametrize("backend", vllm_jobs.BACKENDS)
def test_two_micro_batches_of_vllm_take_turns(world, backend):
    assert max(world.run(vllm_jobs.vllm_micro_batches, 2, backend)) < 1e-6


def test_vllm_gets_a_sentence_for_what_is_not_supported(world):
    for texts in world.run(vllm_jobs.vllm_refusals, 2):
        assert texts[:2] == ["vLLM's own"] * 2
        assert len(texts) == 11
        assert "choose --moe-backend triton" in texts[2]
        assert texts[4].endswith("not mxfp4 in the standard format")
        assert texts[5].endswith("not mxfp8 in the batched format")
        assert texts[7] == (
            "fusco needs each of 4 experts on one rank, and 2 on every rank; ranks have 0: [0, 1]; 1: [0, 1]"
        )
        assert texts[9] == "2 tokens, but the layer was made for 1 on a rank"


SGLANG_METHODS = {
    "unquantised": SGLangUnquantizedMethod(),
    "FP8": SGLangFp8Method(),
    "FP8 on Blackwell": SGLangFp8Method(is_ue8m0=True),
    "MXFP8": SGLangFp8Method(use_mxfp8=True, is_ue8m0=True),
}


@pytest.mark.parametrize("name", SGLANG_METHODS)
def test_sglangs_dispatcher_computes_dense_experts(world, name):
    method, limit = SGLANG_METHODS[name], 1e-6 if name == "unquantised" else 0.03
    for errors in world.run(jobs.sglang_layer, 2, method):
        assert len(errors) == 4
        assert max(errors) < limit  # FP8: sums of two bfloat16 rows of values up to 4


def test_veomnis_experts_compute_dense_ones_with_gradients(world):
    for errors in world.run(jobs.veomni_layer, 2):
        assert len(errors) == 10
        assert max(errors) < 2e-6


def test_torchtitans_layers_share_communicators_and_notice_another_order(world):
    begin = time.monotonic()
    for errors, num_communicators, (first, second) in world.run(jobs.torchtitan_layers, 2):
        assert max(errors) < 1e-6
        assert num_communicators == 2  # of two sizes of rows, for two layers
        assert first.startswith("ranks call different collectives: Communicator(")
        assert second.startswith("ranks call different collectives: dispatch on rank 0, Communicator(")
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    ("mode", "precision", "ranks_per_node"),
    [("normal", "bf16", 4), ("normal", "fp8", 2), ("low-latency", "fp8", 4), ("low-latency", "bf16", 2)],
)
def test_collectivex_sees_each_token_and_right_sums(world, mode, precision, ranks_per_node):
    for errors in world.run(collectivex_jobs.judged, 4, mode, precision, ranks_per_node):
        assert errors.pop("sums") < 0.08  # parts of up to 16, rounded to 8 bits
        assert errors.pop("staged") < 0.03
        assert set(errors.values()) == {0}, errors
