"""Tensors that calls keep: made once for each stream, and never kept where a graph would make them invalid."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fusco.integrations import along_handles
from fusco.integrations.along_handles import KeptTensors
from fusco.integrations.routing_maps import places_of, scattered

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Maker:
    """Counts what it makes."""

    num_made = 0

    def __call__(self) -> torch.Tensor:
        self.num_made += 1
        return torch.tensor(self.num_made)


@pytest.fixture
def current(monkeypatch):
    """Set the current stream, and the number of the capture that it is in."""

    def set_current(stream: int, *, capture: int = 0) -> None:
        monkeypatch.setattr(along_handles, "_stream", lambda _: stream)
        monkeypatch.setattr(along_handles, "capture_number", lambda: capture)

    set_current(1)
    return set_current


def test_a_tensor_is_made_once_for_each_name():
    kept, make = KeptTensors(), Maker()
    assert [int(kept.get(name, CPU, make)) for name in ("a", "b", "a", "b")] == [1, 2, 1, 2]


def test_another_stream_has_its_own_as_nothing_orders_the_two(current):
    kept, make = KeptTensors(), Maker()
    assert int(kept.get("a", CUDA, make)) == 1
    current(2)
    assert int(kept.get("a", CUDA, make)) == 2
    current(1)
    assert int(kept.get("a", CUDA, make)) == 1


def test_what_a_capture_makes_is_not_kept_and_what_was_made_before_is_used_in_it(current):
    kept, make = KeptTensors(), Maker()
    current(1, capture=5)
    assert [int(kept.get("a", CUDA, make)) for _ in range(2)] == [1, 2]
    current(1)
    assert int(kept.get("a", CUDA, make)) == 3
    current(1, capture=5)
    assert int(kept.get("a", CUDA, make)) == 3


def test_what_a_graph_changes_in_each_replay_is_kept_inside_alone(current):
    current(1, capture=5)
    kept, make = KeptTensors(), Maker()
    assert [int(kept.get("a", CUDA, make)) for _ in range(2)] == [1, 1]
    current(1)
    assert [int(kept.get("a", CUDA, make)) for _ in range(2)] == [2, 3]
    current(1, capture=6)
    assert [int(kept.get("a", CUDA, make)) for _ in range(2)] == [4, 5]


def test_without_a_query_for_handles_streams_differ_as_well(monkeypatch):
    monkeypatch.setattr(along_handles, "raw_stream_of", None)
    with mock.patch("torch.cuda.current_stream", return_value=mock.Mock(cuda_stream=7)):
        assert along_handles._stream(CUDA) == 7


def test_values_of_no_expert_and_of_ids_that_are_none_are_dropped():
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    dense = scattered(places_of(torch.tensor([[1, -1, 2], [0, 2, -1]])), values, 2)
    assert dense.tolist() == [[0.0, 1.0], [4.0, 0.0]]
