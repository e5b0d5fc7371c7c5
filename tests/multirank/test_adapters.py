"""Adapters of vLLM 0.33.0, SGLang 0.5.23, VeOmni 0.1.12 and torchtitan 0.3.0, by the signatures of those versions."""

from __future__ import annotations

import time

import adapter_jobs as jobs
import pytest

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_vllms_kernel_computes_dense_experts(world, num_ranks):
    for errors in world.run(jobs.vllm_layers, num_ranks):
        assert len(errors) == 4
        assert max(errors) < 1e-6


def test_vllm_gets_a_sentence_for_what_is_not_supported(world):
    kernel, *texts = world.run(jobs.vllm_refusals, 2)[0]
    assert kernel == "vLLM's own"
    assert len(texts) == 7
    assert texts[0].startswith("Batched does not take rows")
    assert texts[4].endswith("of experts 0 to 1 this rank has [0, -1]")


def test_sglangs_dispatcher_computes_dense_experts(world):
    for errors in world.run(jobs.sglang_layer, 2):
        assert max(errors) < 1e-6


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
