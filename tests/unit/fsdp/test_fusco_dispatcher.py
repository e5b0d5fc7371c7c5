"""Checks of dispatchers that need no ranks."""

from unittest import mock

import pytest
import torch

from fusco import Launch, StaticRows, TransportError
from fusco.fsdp import FuscoDispatcher


class Group:
    """A group of two ranks that do not exist."""

    def size(self):
        return 2


class Communicating:
    """Records that it was synchronised, and may fail."""

    def __init__(self, error=None):
        self.num_waits, self.error = 0, error

    def synchronize(self):
        self.num_waits += 1
        if self.error:
            raise self.error


def test_results_are_used_at_once_so_that_the_stream_must_be_the_callers():
    assert FuscoDispatcher(Group(), 1, launch=Launch(num_sms=7)).launch == Launch(num_sms=7)
    with mock.patch.object(torch.cuda, "Event", mock.Mock):
        for launch in (Launch(own_stream=True), Launch(event=mock.Mock())):
            with pytest.raises(ValueError, match="neither own_stream nor event"):
                FuscoDispatcher(Group(), 1, launch=launch)


def test_static_rows_are_blocks_that_follow_each_other():
    assert FuscoDispatcher(Group(), 1, static=StaticRows(7)).static == StaticRows(7)
    with pytest.raises(ValueError, match=r"got rows_per_expert=7: pass StaticRows\(num_rows\)"):
        FuscoDispatcher(Group(), 1, static=StaticRows(rows_per_expert=7))


def test_synchronize_waits_for_all_communicators_and_raises_what_went_wrong():
    dispatcher = FuscoDispatcher(Group(), 1)
    dispatcher.synchronize()
    fine, broken = Communicating(), Communicating(TransportError("the network is gone"))
    dispatcher._communicators.update({(8, 2, 64): fine, (8, 2, 128): broken})
    with pytest.raises(TransportError, match="the network is gone"):
        dispatcher.synchronize()
    assert (fine.num_waits, broken.num_waits) == (1, 1)
