"""A GPU that cannot do what is asked of it is refused while the communicator is made, in plain words."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch

from fusco import Capacity, ExpertPlacement, Settings, Topology
from fusco.api.create import check_device
from fusco.core.config import EngineConfig
from fusco.cuda.kernels.combine_rows import fitting_ring
from fusco.cuda.kernels.library import Library
from fusco.cuda.kernels.plan import plan_shared_bytes
from fusco.cuda.open_library import open_library
from fusco.cuda.tuning import ROWS_OF_EACH_SHAPE, combine_shape

pytest.importorskip("cuda.core", reason="without cuda-core every GPU is refused")

HOPPER, A100, ADA = 227 << 10, 163 << 10, 99 << 10  # bytes of shared memory in a block


@pytest.fixture
def gpu():
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "device_count", return_value=2),
        mock.patch.object(torch.cuda, "get_device_name", return_value="Tesla V100"),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)) as capability,
    ):
        yield capability


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_new_gpus_are_taken(gpu, capability):
    gpu.return_value = capability
    assert check_device("cuda:1") == torch.device("cuda", 1)
    gpu.assert_called_once_with(1)


def test_an_old_gpu_is_refused(gpu):
    gpu.return_value = (7, 5)
    with pytest.raises(ValueError, match=r"'cuda:1', a Tesla V100 of compute capability 7\.5; fusco needs 8\.0 "):
        check_device("cuda:1")


def library_for(
    placement: ExpertPlacement, limit: int, num_topk: int = 1, max_tokens: int = 4, num_experts: int | None = None
) -> Library:
    capacity = Capacity(max_tokens_per_rank=max_tokens, max_bytes_per_token=16, num_topk=num_topk)
    properties = mock.Mock(shared_memory_per_block_optin=limit)
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=properties):
        config, device = EngineConfig(Topology((0, 0)), capacity, Settings()), torch.device("cuda", 0)
        return open_library(config, placement, device, num_experts)


@pytest.mark.parametrize("limit", [HOPPER, A100])
def test_as_many_experts_as_a_block_can_count_for(limit):
    most = (limit // 4 - 1) // 19
    assert plan_shared_bytes(most) <= limit < plan_shared_bytes(most + 1)
    assert library_for(ExpertPlacement.contiguous(2 * most, 2), limit).max_shared_bytes == limit
    words = rf"num_experts={2 * most + 2} puts {most + 1} on one rank, .* bytes .* but cuda:0 has {limit:,}"
    with pytest.raises(ValueError, match=words):
        library_for(ExpertPlacement.contiguous(2 * most + 2, 2), limit)


def test_a_rank_with_few_experts_refuses_too_where_another_has_too_many():
    most = (HOPPER // 4 - 1) // 19
    with pytest.raises(ValueError, match=f"puts {most + 1} on one rank"):
        library_for(ExpertPlacement.explicit([0] + [1] * (most + 1), 2), HOPPER)


def test_more_experts_of_a_token_than_a_warp_has_lanes_are_refused():
    with pytest.raises(ValueError, match="at most 32 experts a token and 32 ranks a node, got num_topk=33 and 2 ranks"):
        library_for(ExpertPlacement.contiguous(40, 2), HOPPER, num_topk=33)


def test_more_experts_in_several_places_than_a_block_counts_are_refused():
    physical = ExpertPlacement.contiguous(32_000, 16)
    assert library_for(physical, HOPPER, num_experts=10_240)
    assert library_for(physical, HOPPER, num_experts=32_000)
    with pytest.raises(ValueError, match="32000 places for 10241 experts may put 10241 of them into several"):
        library_for(physical, HOPPER, num_experts=10_241)


def test_more_pairs_than_kernels_count_are_refused():
    placement = ExpertPlacement.contiguous(40, 2)
    assert library_for(placement, HOPPER, num_topk=8, max_tokens=2**25 - 1)
    with pytest.raises(ValueError, match=r"max_tokens_per_rank=33554432 and num_topk=8 on 2 ranks make 536870912"):
        library_for(placement, HOPPER, num_topk=8, max_tokens=2**25)


@pytest.mark.parametrize("wire_bytes", [2, 4])
@pytest.mark.parametrize("limit", [HOPPER, A100, ADA])
def test_a_combine_of_any_width_fits_into_a_block_of_whole_warps(limit, wire_bytes):
    for num_rows, num_vectors, num_sms in itertools.product(ROWS_OF_EACH_SHAPE, range(1, 65), (32, 132)):
        wanted = combine_shape(num_rows, num_vectors, num_sms)
        shape = fitting_ring(wanted, limit, 2, wire_bytes)
        num_warps, rest = divmod(shape.num_threads, 32)
        assert (rest, num_warps > 0, shape.depth >= 2) == (0, True, True), (wanted, shape)
        # A stage has 16 bytes of each row for each vector of a thread.
        assert shape.depth * shape.num_threads * shape.unroll * 16 * wire_bytes // 2 < limit, (wanted, shape)
        if limit == HOPPER and wire_bytes == 2:
            assert shape == wanted
