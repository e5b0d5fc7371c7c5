"""Turns of the communicators of a group: ranks agree before they use another one, and only then."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fusco import MismatchError
from fusco.core.config import Capacity
from fusco.integrations.deep_ep.low_latency import LowLatencyHandle
from fusco.integrations.group_communicators import GroupCommunicators

NEED = Capacity(num_topk=1, max_tokens_per_rank=1, max_bytes_per_token=1)
CPU = torch.device("cpu")


class Group:
    """A process group, of which nothing is asked here."""


def communicator(num_experts: int) -> SimpleNamespace:
    """A communicator with room for everything, which agrees to everything."""
    return SimpleNamespace(
        is_broken=False,
        agree=mock.Mock(),
        abort=lambda: None,
        fitting=lambda _, dispatch: dispatch(),
        placement=SimpleNamespace(num_experts=num_experts),
    )


@pytest.fixture
def comms():
    comms = GroupCommunicators(Group())
    comms._communicators.update({8: communicator(8), 4: communicator(4)})
    comms.current, comms._purpose = comms._communicators[8], ("dispatch", 8)
    return comms


def test_ranks_agree_before_they_use_another_communicator_and_only_then(comms):
    first, other, call = comms._communicators[8], comms._communicators[4], mock.Mock()
    comms.run(("dispatch", 8), 8, NEED, CPU, call)
    comms.turn_to(first, "combine")
    first.agree.assert_not_called()
    comms.run(("dispatch", 4), 4, NEED, CPU, call)
    call.assert_called_with(other)
    first.agree.assert_called_once_with("dispatch to 4 experts after dispatch to 8 experts")
    comms.turn_to(other, "combine")
    other.agree.assert_not_called()
    comms.turn_to(first, "combine")
    other.agree.assert_called_once_with("combine along a handle of a communicator for 8 experts")


def test_ranks_stay_where_they_are_if_they_do_not_agree(comms):
    first, call = comms._communicators[8], mock.Mock()
    first.agree.side_effect = MismatchError("out of step")
    with pytest.raises(MismatchError):
        comms.run(("dispatch", 4), 4, NEED, CPU, call)
    with pytest.raises(MismatchError):
        comms.turn_to(comms._communicators[4], "combine")
    comms.run(("dispatch", 8), 8, NEED, CPU, call)
    call.assert_called_once_with(first)


def test_a_handle_names_source_ranks_as_they_were_numbered_in_its_dispatch():
    """A rank may fail between the end of a call and the making of its handle."""
    comm = SimpleNamespace(topology=SimpleNamespace(numbers=(0, 2)), placement=SimpleNamespace(world_size=3))
    slots = torch.tensor([[0, 5], [1, 6], [2, 7]])
    handle = SimpleNamespace(plan=SimpleNamespace(slot_to_source=slots), rows_shape=(1, 3))
    rows = SimpleNamespace(num_rows_per_expert=torch.tensor([3]))
    sent = SimpleNamespace(comm=comm, topology=SimpleNamespace(numbers=(0, 1, 2)), handle=handle, dispatched=rows)
    assert LowLatencyHandle(sent, 1, 1)._sources.tolist() == [slots.tolist()]
