"""Which errors of a call make all ranks compare what they need, and which must not, as the others would not come."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fusco import RejectedInputError, RowOverflowError
from fusco.integrations.growth import GrowingCommunicator, Need

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
