"""Which errors of a call make all ranks compare what they need, and which must not, as the others would not come."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fusco import RejectedInputError, RowOverflowError
from fusco.integrations.growth import GrowingCommunicator, Need
from fusco.integrations.routing_maps import RoutingMaps

NEED = Need(num_topk=1, max_tokens_per_rank=1, max_bytes_per_token=1)


class Group:
    """A process group."""


@pytest.mark.parametrize(
    ("error", "device", "is_broken", "compares"),
    [
        (ValueError("too many tokens"), "cpu", False, True),
        (RejectedInputError("of another rank"), "cpu", False, True),
        (torch.OutOfMemoryError("on this rank"), "cuda", True, False),
        (RowOverflowError(0, 1, 2), "cuda", False, True),  # of an earlier call: other ranks' are rejected
        (RowOverflowError(0, 1, 2), "cpu", False, False),
    ],
)
def test_ranks_compare_their_needs_only_after_errors_that_all_raise(error, device, is_broken, compares):
    group = Group()
    growing = GrowingCommunicator(group, num_experts=2)
    growing._communicators.append(SimpleNamespace(is_broken=is_broken, abort=lambda: None))
    growing._capacity = NEED
    call = mock.Mock(side_effect=error)
    with mock.patch.object(growing, "_grow", return_value=False) as grow, pytest.raises(type(error)):
        growing.run(NEED, torch.device(device), call)
    assert grow.called is compares


def test_a_first_call_without_tokens_does_not_limit_the_experts_of_later_ones():
    maps = RoutingMaps()
    routing_map = torch.zeros(2, 16, dtype=torch.bool)
    routing_map[0, :6] = True
    with mock.patch.object(torch.Tensor, "is_cuda", True):
        assert maps.indices_of(routing_map[:0]).shape == (0, 1)
        assert maps.indices_of(~routing_map & routing_map).tolist() == [[-1], [-1]]
        assert maps.indices_of(routing_map).tolist()[0] == [0, 1, 2, 3, 4, 5, -1, -1]
