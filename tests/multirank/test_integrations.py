"""The ``deep_ep`` module: HybridEP's and DeepEP's calls as frameworks make them, on 2 and 4 ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import along_handle_jobs
import deep_ep_jobs
import hybrid_ep_jobs
import integration_jobs as jobs
import integration_mistake_jobs
import out_of_step_jobs
import pytest

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]


@pytest.mark.parametrize(("num_ranks", "ranks_per_node", "pad_multiple"), [(2, 2, None), (4, 2, 4)])
def test_hybrid_ep_moves_rows_and_gradients_while_it_grows(world, num_ranks, ranks_per_node, pad_multiple):
    world.run(hybrid_ep_jobs.check_hybrid_ep, num_ranks, ranks_per_node, pad_multiple)


@pytest.mark.parametrize(
    "tamper",
    [
        "drop a token",
        "swap two rows of an expert",
        "forget the gradients of weights",
        "version 1: drop a token",
        "version 1: forget weights",
    ],
)
def test_the_checks_find_faults(world, tamper):
    assert any(world.run(hybrid_ep_jobs.finds_a_fault, 2, tamper))


def test_hybrid_ep_without_permutation_moves_one_row_for_each_rank(world):
    world.run(hybrid_ep_jobs.check_rank_rows, 4, 2)


def test_experts_that_a_map_loses_are_an_error(world):
    world.run(hybrid_ep_jobs.check_lost_experts, 2)


def test_a_process_ends_in_silence_with_buffers_that_nothing_closed(tmp_path):
    code = (
        "import os, sys, torch.distributed as dist, integration_jobs\n"
        "ranks = []\n"
        "for rank in range(2):\n"
        "    ranks.append(os.fork())  # a new interpreter takes seconds to start, and ends as these do\n"
        "    if not ranks[-1]:\n"
        "        dist.init_process_group('gloo', store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)\n"
        "        sys.exit(integration_jobs.leave_open(dist.group.WORLD))\n"
        "sys.exit(max(os.waitpid(rank, 0)[1] for rank in ranks))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "store"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_handle_replays_rows_and_weights(world):
    world.run(hybrid_ep_jobs.check_replay, 2)


def test_a_handle_takes_other_weights_and_values_each_time(world):
    world.run(along_handle_jobs.check_other_weights_along_handles, 2)


def test_calls_along_a_handle_compute_little_outside_their_collective(world):
    for counted in world.run(along_handle_jobs.ops_along_handles, 2):
        # On CUDA both combines with values are one collective.
        assert counted == {
            "dispatch": (4, 1),
            "combine": (4, 2),
            "dispatch_with_permute": (2, 1),
            "combine_with_unpermute": (5, 2),
            "version 1: dispatch": (0, 1),
            "version 1: combine": (0, 1),
        }


def test_one_buffer_serves_layers_with_different_numbers_of_experts(world):
    world.run(hybrid_ep_jobs.check_layers_with_different_experts, 2)


def test_rows_of_bytes_come_back_wider(world):
    world.run(hybrid_ep_jobs.check_fp8, 2)


def test_a_dispatch_that_does_not_block_has_the_rows_asked_for(world):
    world.run(hybrid_ep_jobs.check_static_rows, 2)


def test_deep_ep_moves_one_row_for_each_token_and_rank(world):
    world.run(deep_ep_jobs.check_deep_ep, 4)


def test_the_second_versions_rows_are_by_expert(world):
    world.run(deep_ep_jobs.check_elastic, 4)


def test_the_second_version_refuses_other_parts_in_a_sentence(world):
    texts, _ = world.run(deep_ep_jobs.elastic_refusals, 2)
    assert len(texts) == 5
    only = "NotImplementedError: fusco's {} has dispatch and combine only, not {}"
    assert texts[0] == only.format("ElasticBuffer", "buffers on the CPU (num_cpu_bytes=1)")
    assert texts[2] == "ValueError: dispatch with do_cpu_sync=False needs num_max_tokens_per_rank"
    assert texts[4] == only.format("ElasticBuffer", "pp_send")


def test_models_may_be_built_under_another_default_device_and_dtype(world):
    world.run(jobs.under_default_device, 2)


def test_bad_calls_are_refused_in_a_sentence(world):
    first, second = world.run(integration_mistake_jobs.refusals, 2)
    assert len(first) == len(second) == 7
    assert first[3].startswith("ValueError: topk_idx[0, 0] = -2 is not an expert")
    assert second[3].startswith("RejectedInputError: ")
    assert "rank 0" in second[3]
    del first[3], second[3]
    assert first == second
    assert first[0] == "ValueError: dispatch_with_permute needs one of routing_map, topk_idx and handle"
    assert first[-1].startswith("NotImplementedError: fusco's Buffer has DeepEP's normal and low-latency modes only")


def test_handles_of_other_calls_are_named(world):
    def needs(maker, given):
        return f"TypeError: this call needs the handle that {maker} returned, got {given}"

    for texts in world.run(deep_ep_jobs.refusals_of_handles, 2):
        assert texts == [
            needs("dispatch of a HybridEPBuffer", "(Tensor, RankRouting)"),
            needs("dispatch of a HybridEPBuffer", "(Tensor, RankRouting)"),
            needs("dispatch of a HybridEPBuffer", "NoneType"),
            "ValueError: weights and values of experts need the handle of a dispatch with topk_idx; this one was "
            "made with is_token_in_rank only",
            needs("dispatch_with_permute of a HybridEPBuffer", "(RankRouting)"),
            needs("dispatch_with_permute of a HybridEPBuffer", "()"),
            needs("dispatch of a Buffer", "(SentRows)"),
        ]


def test_a_mistake_of_one_rank_is_told_to_all_others_at_once(world):
    of_others, of_rank_1 = world.run(integration_mistake_jobs.mistakes_of_one_rank, 2)
    assert all(seconds < 10 for _, seconds in [*of_others, *of_rank_1]), (of_others, of_rank_1)
    for (theirs, _), (own, _) in zip(of_others, of_rank_1, strict=True):
        assert not own.startswith("RejectedInputError")
        assert theirs.startswith("RejectedInputError: ")
        assert f"rank 1 rejected its input: {own.partition(': ')[2]}" in theirs


def test_ranks_out_of_step_say_what_each_calls_and_go_on(world):
    first, second = world.run(out_of_step_jobs.calls_of_two_kinds, 2)
    assert first == second
    assert len(first) == 30
    assert set(first) >= {
        "MismatchError: ranks call different collectives: " + calls
        for calls in (
            "dispatch to 6 experts on rank 0, dispatch_with_permute to 6 experts on rank 1",
            "dispatch to 2 experts on rank 0, dispatch to 6 experts on rank 1",
            "dispatch on rank 0, dispatch to 2 experts after dispatch to 6 experts on rank 1",
            "dispatch on rank 0, combine on rank 1",
            "larger dispatch on rank 0, combine on rank 1",
            "dispatch on rank 0, combine along a handle of 4 tokens, size 0 on rank 1",
            "dispatch_again along a handle of 4 tokens, size 0 on rank 0, larger dispatch on rank 1",
        )
    }


@pytest.mark.parametrize("job", [out_of_step_jobs.memory_that_ends, out_of_step_jobs.bad_routings])
def test_what_one_rank_lacks_or_mistakes_is_told_to_the_other_in_the_same_call(world, job):
    first, second = world.run(job, 2)
    for theirs, own in zip(first, second, strict=True):
        assert theirs.startswith("RejectedInputError: ")
        assert theirs.endswith(f"rank 1 rejected its input: {own.partition(': ')[2]}")
    if job is out_of_step_jobs.bad_routings:
        counts = Counter(text.partition(":")[0] for text in second)
        assert counts == {"ValueError": 25, "TypeError": 5}
        assert sum("topk_idx[2, 1] = 99 is not an expert: ids go from 0 to 5" in text for text in second) == 6
    else:
        assert all(text.startswith("MemoryError: no memory for ") for text in second)


def test_the_others_name_a_rank_that_leaves_in_a_layer(world):
    *others, _ = world.run(jobs.killed_in_a_layer, 4)
    assert all("rank 3" in text for text in others), others
