"""Dispatch and combine as operations: what selective checkpointing keeps, what torch.compile makes of them."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("transformers", reason="tests of fusco.fsdp need transformers: pip install 'transformers>=5.9'")

import fsdp_ops_jobs as jobs
from fsdp_runs import Run
from test_fsdp import assert_small

from fusco import Launch

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]

NUM_LAYERS = 2


def test_full_checkpointing_shuffles_again_and_selective_does_not(four):
    """Backward, a layer by itself dispatches once along its routing, and combines gradients of rows and of weights."""
    seen = {how: four.run(jobs.verbs_of_a_step, Run(recomputes=how))[0] for how in ("none", "full", "selective")}
    for how, verbs in seen.items():
        assert verbs["forward"] == {"dispatch": NUM_LAYERS, "combine": NUM_LAYERS}, how
    mirrored = Counter(dispatch_again=NUM_LAYERS, combine=2 * NUM_LAYERS)
    assert seen["none"]["backward"] == seen["selective"]["backward"] == mirrored
    assert seen["full"]["backward"] == mirrored + Counter(dispatch=NUM_LAYERS, combine=NUM_LAYERS)
    assert seen["none"]["handles"] == seen["full"]["handles"] == {"held": 0, "left": 0}
    assert seen["selective"]["handles"] == {"held": NUM_LAYERS, "left": 0}


def test_verbs_and_operations_leave_multiprocessors_to_others_backward_too(four):
    """A layer by itself shuffles twice forward and three times backward."""
    for seen in four.run(jobs.launches_of_a_step, Run(recomputes="selective")):
        assert seen == [Launch(num_sms=32)] * (5 * NUM_LAYERS)


def test_the_next_layer_is_gathered_before_tokens_of_this_one_move(four):
    """So that both go on at once; without prefetch a layer's experts wait for what its tokens wait for already."""
    first, second = ([f"gather layers.{layer}", f"gather layers.{layer}.mlp.experts"] for layer in range(NUM_LAYERS))
    forward, backward = ["dispatch", "combine"], ["dispatch_again", "combine", "combine"]
    for events in four.run(jobs.order_of_a_step, has_prefetch=True):
        assert events == ["gather ", *first, *second, *forward * 2, *second, *first, *backward * 2]
    for events in four.run(jobs.order_of_a_step, has_prefetch=False):
        assert events[:7] == ["gather ", *first, *forward, *second]


def test_selective_checkpointing_keeps_what_the_reference_exchanges(four):
    seen = {
        how: four.run(jobs.exchanges_of_a_step, Run(recomputes=how, dispatcher="torch"))[0]
        for how in ("none", "full", "selective")
    }
    assert all(exchanges["forward"] == 2 * NUM_LAYERS for exchanges in seen.values())
    assert seen["none"]["backward"] == seen["selective"]["backward"] == 2 * NUM_LAYERS
    assert seen["full"]["backward"] == 4 * NUM_LAYERS


def test_contexts_of_torch_keep_shuffles_too(four):
    for calls in four.run(jobs.verbs_with_contexts_of_torch):
        assert calls == {"dispatch": 1, "combine": 3, "dispatch_again": 1}


def test_limits_of_selective_checkpointing_raise(four):
    four.run(jobs.check_misuse_of_selective_checkpointing)


def test_the_reference_waits_on_the_host_once_a_layer(four):
    """As fusco's dispatch does with outputs of exact size."""
    assert four.run(jobs.host_waits_of_a_dispatch) == [{"tolist": 1}] * 4


def test_blocks_that_recompute_reject_a_cache(two):
    two.run(jobs.check_caches, Run(recomputes="full"))


@pytest.mark.parametrize("wants", [(), ("x", "weights")])
def test_operators_compute_what_verbs_compute(four, wants):
    for differences in four.run(jobs.differences_from_verbs, wants):
        assert set(differences) == {"rows", "out", "counts", *wants}
        assert not any(differences.values())


def test_handles_live_as_long_as_their_tickets(four):
    four.run(jobs.check_tickets)


def test_operations_are_what_torch_expects(four):
    four.run(jobs.check_operations)


def test_a_block_compiles_to_one_graph(two):
    for differences in two.run(jobs.differences_of_a_compiled_block):
        assert len(differences) == 2 * 4  # of the input, the router and two projections, for two batches
        assert not any(differences)


@pytest.mark.parametrize("recomputes", ["none", "full", "selective"])
def test_a_model_compiles_with_breaks_where_compilers_are_kept_out_only(one, recomputes):
    """At FSDP's hooks, and in float32 at the experts' projections."""
    run = Run(kind="qwen3 of one layer", recomputes=recomputes, ep_size=1, nums_sequences=(2,))
    for differences, breaks in one.run(jobs.differences_of_a_compiled_model, run):
        assert_small(differences)
        if recomputes == "none":
            assert len(breaks) == 2
            assert "function `disable`" in breaks[0]
            assert "the sizes of blocks are values of a tensor" in breaks[1]
