"""Checks of dispatchers that need no ranks."""

from unittest import mock

import pytest
import torch

from fusco import Launch, StaticRows, TransportError
from fusco.fsdp import FuscoDispatcher
from fusco.fsdp.dispatcher import Arrival
from fusco.placement import Balance


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


def test_copies_are_sent_before_a_dispatch_if_the_last_batch_had_some(monkeypatch):
    """As the device has planned; a host that has waited in dispatch knows of none, and then there are none."""
    calls, empty = [], torch.empty
    comm = mock.Mock(prefetch_experts=lambda weights, *_: calls.append("copies") or weights)
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())

    def unpinned(*shape, pin_memory, **options):
        assert pin_memory, "the host would wait for the copy"
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", unpinned)
    dispatcher, weight = FuscoDispatcher(Group(), 1), torch.ones(1)

    def dispatch_planned(num_copies, on_host):
        arrival = Arrival(weight, weight, None, on_host)
        monkeypatch.setattr(dispatcher, "dispatch", lambda *_: calls.append("dispatch") or arrival)
        plan = mock.Mock(table=torch.tensor([num_copies, 1], dtype=torch.int32), balance=Balance(1))
        found, copies = dispatcher._dispatch_planned(comm, plan, (weight, weight, weight, 2), {"up": weight})
        assert found is arrival
        order = [*calls]
        calls.clear()
        return order, [*copies.weights]

    behind, before, alone = ["dispatch", "copies"], ["copies", "dispatch"], ["dispatch"]
    assert dispatch_planned(0, weight) == (alone, [])
    assert dispatch_planned(2, weight) == (behind, ["up"])
    assert dispatch_planned(2, weight) == (before, ["up"])
    assert dispatch_planned(0, weight) == (before, [])
    assert dispatch_planned(0, None) == (behind, ["up"])
    assert dispatch_planned(0, None) == (before, ["up"])
