"""Routing maps on CUDA, whose width is that of the first call."""

from functools import partial
from unittest import mock

import pytest
import torch

from fusco.integrations.deep_ep.hybrid_ep_buffer import HybridEPBuffer
from fusco.integrations.routing_maps import RoutingMaps

ALL = torch.ones(3, 8, dtype=torch.bool)


@pytest.fixture
def maps(monkeypatch):
    """Maps of tensors that say that they are on CUDA; host memory is not pinned."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch, "empty", partial(_empty, torch.empty))
    return RoutingMaps()


def _empty(empty, *shape, pin_memory, **options):
    return empty(*shape, **options)


def test_a_first_call_without_tokens_does_not_limit_the_experts_of_later_ones(maps):
    routing_map = torch.zeros(2, 16, dtype=torch.bool)
    routing_map[0, :6] = True
    assert maps.indices_of(routing_map[:0]).shape == (0, 1)
    assert maps.indices_of(~routing_map & routing_map).tolist() == [[-1], [-1]]
    assert maps.indices_of(routing_map).tolist()[0] == [0, 1, 2, 3, 4, 5, -1, -1]


def test_experts_that_indices_lack_are_counted_and_an_error(maps):
    maps.indices_of(ALL.tril())
    maps.require_none_lost()
    assert maps.indices_of(ALL).shape == (3, 4)
    assert maps.lost.tolist() == [12]
    with pytest.raises(ValueError, match="tokens with more than 4 experts"):
        maps.require_none_lost()


def test_a_call_with_indices_is_right_after_a_map_that_was_too_wide(maps):
    """The error says to pass indices."""
    maps.indices_of(ALL.tril())
    maps.indices_of(ALL)
    ids = torch.zeros(3, 5, dtype=torch.int64)
    HybridEPBuffer._routing(mock.Mock(_maps=maps), "dispatch", None, ids, (None, None), (3, 8))
    assert maps.lost is None
    maps.require_none_lost()
