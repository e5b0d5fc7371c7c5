"""The low-latency calls of DeepEP's first version, and both layouts of 2.5, on 2 and 4 ranks."""

from __future__ import annotations

import ep_buffer_jobs
import low_latency_jobs
import pytest

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]


def test_low_latency_rows_are_masked_and_take_weights_when_they_come_back(world):
    world.run(low_latency_jobs.check_low_latency, 4)


@pytest.mark.parametrize("has_hook", [False, True])
def test_weights_and_source_ranks_of_low_latency_rows_are_returned_on_request(world, has_hook):
    world.run(low_latency_jobs.check_row_weights, 2, has_hook=has_hook)


def test_low_latency_rows_come_as_fp8_with_scales_of_each_kind(world):
    world.run(low_latency_jobs.check_fp8, 2)


@pytest.mark.parametrize("has_hook", [False, True])
def test_low_latency_rows_come_as_nvfp4_in_tiles_of_scales(world, has_hook):
    world.run(low_latency_jobs.check_nvfp4, 2, has_hook=has_hook)


def test_low_latency_calls_refuse_what_they_lack_in_a_sentence(world):
    for texts in world.run(low_latency_jobs.low_latency_refusals, 2):
        assert texts == [
            "ValueError: x has shape (2, 256), but this call needs at most (1, hidden)",
            "ValueError: 5 experts do not divide among 2 ranks",
            "ValueError: async_finish and return_recv_hook exclude each other: an event, or a hook, waits for the call",
            "ValueError: dispatch_wait_recv_cost_stats has shape (4,), but this call needs (2,)",
            "ValueError: use_ue8m0=True needs round_scale=True: exponents are those of powers of two",
            "ValueError: use_fp8=True and use_nvfp4=True exclude each other: rows have one format",
            "ValueError: use_nvfp4=True needs x_global_scale of one element, got None",
            "ValueError: use_nvfp4=True needs x_global_scale of one element, got shape (2,)",
            "NotImplementedError: fusco's NVFP4 rows have scales of e4m3, not of ue8m0: use_ue8m0_for_sf=True",
            "ValueError: topk_weights has shape (1, 2), but this call needs (2, 2)",
            "ValueError: topk_idx differs from that of the dispatch, which the handle has",
            "ValueError: topk_weights has shape (1, 2), but this call needs (2, 2)",
            "TypeError: this call needs the handle of a dispatch, got tuple",
            "TypeError: low_latency_combine has no argument zerocopy",
            *(
                f"NotImplementedError: fusco's Buffer has DeepEP's normal and low-latency modes only, not {what}"
                for what in (
                    "sums of rows whose experts have not finished (overlap=True)",
                    "communication without rank 1 unless it is made with enable_shrink=True",
                    "dispatch_pcie",
                    "get_local_buffer_tensor",
                )
            ),
        ]


@pytest.mark.parametrize("enable_shrink", [False, True])
def test_waits_are_counted_for_the_rank_that_is_late(world, enable_shrink):
    of_ranks = world.run(low_latency_jobs.waits_by_rank, 2, enable_shrink=enable_shrink)
    for rank, (in_dispatch, in_combine) in enumerate(of_ranks):
        assert in_dispatch[rank] == in_combine[rank] == 0
        if rank == 0:
            assert 0.5 < in_dispatch[1] < 3
            assert 0.2 < in_combine[1] < 3
        else:
            assert max(in_dispatch[0], in_combine[0]) < 0.2


def test_rows_of_the_second_version_are_by_source_rank_unless_expanded(world):
    world.run(ep_buffer_jobs.check_rows_by_source, 4)


def test_copies_of_experts_get_weights_and_return_gradients(world):
    world.run(ep_buffer_jobs.check_expert_copies, 4)
