"""Slots of messages to other nodes, over a network on which messages wait until the test says that they are sent."""

import torch

from fusco.cpu.channel import SendRing
from fusco.cpu.transport import Ticket


class HeldNetwork:
    """Transport that holds every message; ``sent`` has, in order, destination, bytes and ticket."""

    def __init__(self):
        self.sent = []

    def send(self, message, dst):
        self.sent.append((dst, message.tolist(), Ticket()))
        return self.sent[-1][2]


def send(ring, value, dst):
    slot = ring.slot()
    assert slot is not None
    slot[:2] = value
    ring.commit(2, dst)


def test_a_slow_destination_keeps_no_slots_but_its_own():
    network = HeldNetwork()
    ring = SendRing(network, list(torch.zeros(3, 4, dtype=torch.uint8)))
    send(ring, 1, dst=7)
    for value in range(2, 12):
        send(ring, value, dst=5)
        network.sent[-1][2].is_done = True
    assert [(dst, message) for dst, message, _ in network.sent] == [(7, [1, 1])] + [(5, [i, i]) for i in range(2, 12)]
    assert not ring.is_drained
    network.sent[0][2].is_done = True
    assert ring.is_drained


def test_no_slot_is_free_while_all_messages_are_on_the_network():
    network = HeldNetwork()
    slots = list(torch.zeros(2, 4, dtype=torch.uint8))
    ring = SendRing(network, slots)
    for dst in (1, 2):
        send(ring, 9, dst)
    assert ring.slot() is None
    network.sent[1][2].is_done = True
    assert ring.slot() is slots[1]
    assert slots[0].tolist() == [9, 9, 0, 0]
