"""What makes ranks gather what they need, as the others would not come after anything else."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fusco import MismatchError, RejectedInputError, RowOverflowError
from fusco.control.fingerprint import GROWTH
from fusco.core.config import Capacity
from fusco.core.errors import GrowthError
from fusco.integrations.growth import GrowingCommunicators, Grown

SMALL, LARGE = (Capacity(num_topk=1, max_tokens_per_rank=tokens, max_bytes_per_token=1) for tokens in (1, 2))
CPU = torch.device("cpu")


class Group:
    """A process group, of which nothing is asked here."""


def grown(number: int) -> Grown:
    """A communicator with room for one token, which agrees to everything."""
    return Grown(SimpleNamespace(is_broken=False, agree=mock.Mock(), abort=lambda: None), SMALL, number)


@pytest.fixture
def comms():
    comms = GrowingCommunicators(Group())
    comms._latest[8] = comms._current = grown(0)
    comms._purpose = ("dispatch", 8)
    with mock.patch.object(comms, "_make", return_value=grown(1)):
        yield comms


@pytest.mark.parametrize(
    ("error", "grows"),
    [
        (GrowthError("on another rank"), True),
        (MismatchError("out of step"), False),
        (RejectedInputError("of another rank"), False),
        (ValueError("too many tokens"), False),
        (MemoryError("on this rank"), False),
        (RowOverflowError(0, 1, 2), False),
    ],
)
def test_ranks_gather_what_they_need_only_for_size(comms, error, grows):
    call = mock.Mock(side_effect=[error, "sent"])
    if grows:
        assert comms.run(("dispatch", 8), 8, SMALL, CPU, call) == "sent"
    else:
        with pytest.raises(type(error)):
            comms.run(("dispatch", 8), 8, SMALL, CPU, call)
    assert comms._make.called is grows


def test_a_dispatch_without_room_is_not_called_before_there_is(comms):
    first, call = comms._current, mock.Mock(return_value="sent")
    assert comms.run(("dispatch", 8), 8, LARGE, CPU, call) == "sent"
    first.comm.agree.assert_called_once_with(GROWTH)
    call.assert_called_once_with(comms._make.return_value)


def test_ranks_agree_before_they_use_another_communicator_and_only_then(comms):
    first, other, call = comms._current, grown(1), mock.Mock()
    comms._latest[4] = other
    comms.run(("dispatch", 8), 8, SMALL, CPU, call)
    comms.turn_to(first, "combine")
    first.comm.agree.assert_not_called()
    comms.run(("dispatch", 4), 4, SMALL, CPU, call)
    first.comm.agree.assert_called_once_with("dispatch to 4 experts after dispatch to 8 experts")
    comms.turn_to(other, "combine")
    other.comm.agree.assert_not_called()
    comms.turn_to(first, "combine")
    other.comm.agree.assert_called_once_with("combine along a handle of communicator 0")


def test_ranks_stay_where_they_are_if_they_do_not_agree(comms):
    first, other, call = comms._current, grown(1), mock.Mock()
    first.comm.agree.side_effect = MismatchError("out of step")
    comms._latest[4] = other
    with pytest.raises(MismatchError):
        comms.run(("dispatch", 4), 4, SMALL, CPU, call)
    with pytest.raises(MismatchError):
        comms.turn_to(other, "combine")
    comms.run(("dispatch", 8), 8, SMALL, CPU, call)
    call.assert_called_once_with(first)
