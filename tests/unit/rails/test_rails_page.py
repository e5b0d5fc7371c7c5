"""The example of docs/rails.md: an endpoint receives what another sends, here over loopback addresses."""

from __future__ import annotations

from queue import SimpleQueue
from threading import Thread

import numpy as np
from rails_ends import RAILS, random_bytes

import fusco.rails
from snippets import python_of


def test_the_snippets_of_rails_run(monkeypatch):
    monkeypatch.setattr(fusco.rails, "discover_rails", lambda interfaces: RAILS[: len(interfaces)])
    receiving, sending = python_of("docs/rails.md")
    store = Store()
    layers = [random_bytes(300_000)]
    cache = np.empty(1_000_000, np.uint8)
    receiver = {"store": store, "cache": cache}
    thread = Thread(target=exec, args=(receiving, receiver), daemon=True)
    thread.start()
    exec(sending, {"store": store, "layers": layers})
    thread.join(20.0)
    receiver["endpoint"].close()
    assert receiver["size"] == len(layers[0])
    assert np.array_equal(cache[: receiver["size"]], layers[0])


class Store:
    """A store of one process, which waits for keys."""

    def __init__(self):
        self._queue = SimpleQueue()

    def set(self, _, value):
        self._queue.put(value)

    def get(self, _):
        return self._queue.get(timeout=20.0)
