"""Max-min fair rates of flows over links, in time: progressive filling at every start and end of a flow.

A flow uses all of its links at once. Rates are weighted max-min fair: on its bottleneck a flow has the part of the link
that its weight is of the weights there. Checked against SimGrid's model of networks (CM02 without latencies).

Shape symbols: F flows, L links, G gates, P entries of all routes, B samples.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fusco.core.compiled import compiled

_ROUNDING = 1e-12  # of shares that are equal but for rounding, and of bytes that are left


@compiled()
def _push(keys: Any, items: Any, size: int, key: float, item: int) -> int:
    """Add to a binary heap with the least key first; returns its size."""
    at = size
    while at > 0 and keys[(at - 1) >> 1] > key:
        keys[at], items[at] = keys[(at - 1) >> 1], items[(at - 1) >> 1]
        at = (at - 1) >> 1
    keys[at], items[at] = key, item
    return size + 1


@compiled()
def _pop(keys: Any, items: Any, size: int) -> int:
    """Remove the first entry of a heap, which the caller has read; returns its size."""
    size -= 1
    key, item, at = keys[size], items[size], 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and keys[child + 1] < keys[child]:
            child += 1
        if keys[child] >= key:
            break
        keys[at], items[at] = keys[child], items[child]
        at = child
    keys[at], items[at] = key, item
    return size


class Network(NamedTuple):
    """What does not change while flows run.

    ``first`` int64 (F + 1,) and ``links`` (P,): the links of flow ``f`` are ``links[first[f] : first[f + 1]]``.
    ``num_bytes`` and ``weight`` float64 (F,). ``gate_first`` int64 (G + 1,) and ``gate_flows``: the flows that gate
    ``g`` lets start. ``ends`` int64 (F, 4): three gates that a flow counts down, and the flow that follows it; -1 for
    none. ``delay`` float64 (G,): from the last flow that a gate waits for until it opens. ``capacity`` float64 (L,),
    bytes in a unit of time.
    """

    first: Any
    links: Any
    num_bytes: Any
    weight: Any
    gate_first: Any
    gate_flows: Any
    ends: Any
    delay: Any
    capacity: Any


class State(NamedTuple):
    """What changes. ``pending`` int64 (F,): gates and flows that a flow waits for; ``count`` (G,): flows of a gate.

    ``left``, ``rate`` float64 (F,). ``heap`` (2, G + 1): gates that will open, the first of them first. ``active`` and
    ``ready`` int64 (F,): flows that run, and that may start. ``slots`` (P,): entries of each link's active flows, from
    ``begin[link]`` on, ``num_on[link]`` of them; ``place`` (P,): where an entry is; ``flow_of`` (P,): its flow.
    ``work`` (5, L): capacity and weight left, keys and items of the heap of links, flows without a rate.
    ``numbers`` (5,): active flows, ready flows, gates in the heap, flows that ended, updates of rates.
    ``times`` (2, F): start and end of each flow. ``of_links`` (2, L): bytes and highest rate of each link.
    """

    pending: Any
    count: Any
    left: Any
    rate: Any
    heap: Any
    active: Any
    ready: Any
    slots: Any
    begin: Any
    num_on: Any
    place: Any
    flow_of: Any
    work: Any
    numbers: Any
    times: Any
    of_links: Any


_ACTIVE, _READY, _OPENING, _ENDED, _UPDATES = range(5)


@compiled()
def _fill(network: Any, state: Any) -> None:
    """Set the rate of the active flows; ``work[0]`` is what remains of each link.

    Step 1: each link's share is its capacity over the weights of its flows. Step 2: the link with the least share is
    full: its flows have that share, which is taken off their other links. Step 3: repeat with the flows that are left.
    """
    left, load, keys, items, count = state.work[0], state.work[1], state.work[2], state.work[3], state.work[4]
    first, links = network.first, network.links
    left[:], load[:], count[:] = network.capacity, 0.0, 0.0
    for i in range(state.numbers[_ACTIVE]):
        flow = state.active[i]
        state.rate[flow] = -1.0
        for entry in range(first[flow], first[flow + 1]):
            load[links[entry]] += network.weight[flow]
            count[links[entry]] += 1.0
    size = 0
    for link in range(len(count)):
        if count[link] > 0:
            size = _push(keys, items, size, left[link] / load[link], link)
    while size > 0:
        key, link = keys[0], int(items[0])
        size = _pop(keys, items, size)
        if count[link] < 0.5:
            continue
        share = max(left[link], 0.0) / load[link]
        if share > key * (1.0 + _ROUNDING):
            size = _push(keys, items, size, share, link)
        else:
            _fill_link(network, state, link, share)


@compiled()
def _fill_link(network: Any, state: Any, link: int, share: float) -> None:
    """Give the flows of a full link their share, and take it off their other links."""
    left, load, count = state.work[0], state.work[1], state.work[4]
    for at in range(state.begin[link], state.begin[link] + state.num_on[link]):
        flow = state.flow_of[state.slots[at]]
        if state.rate[flow] >= 0.0:
            continue
        state.rate[flow] = share * network.weight[flow]
        for entry in range(network.first[flow], network.first[flow + 1]):
            other = network.links[entry]
            left[other] -= state.rate[flow]
            load[other] -= network.weight[flow]
            count[other] -= 1.0


@compiled()
def _sample(samples: Any, width: float, begin: float, end: float, used: Any) -> float:
    """Add bytes at rates ``used`` from ``begin`` to ``end`` to samples; returns their width, doubled where needed."""
    num_samples = len(samples)
    while end > width * num_samples:
        for i in range(num_samples // 2):
            samples[i] = samples[2 * i] + samples[2 * i + 1]
        samples[num_samples // 2 :] = 0.0
        width *= 2.0
    at = int(begin / width)
    while at < num_samples and at * width < end:
        overlap = min(end, (at + 1) * width) - max(begin, at * width)
        if overlap > 0:
            for link in range(len(used)):
                samples[at, link] += used[link] * overlap
        at += 1
    return width


@compiled()
def _start(network: Any, state: Any, flow: int, now: float) -> None:
    """Start a flow; one without bytes or links ends at once."""
    first, links = network.first, network.links
    state.times[0, flow] = now
    if state.left[flow] <= 0 or first[flow] == first[flow + 1]:
        _end(network, state, flow, now)
        return
    state.active[state.numbers[_ACTIVE]] = flow
    state.numbers[_ACTIVE] += 1
    for entry in range(first[flow], first[flow + 1]):
        link = links[entry]
        state.place[entry] = state.begin[link] + state.num_on[link]
        state.slots[state.place[entry]] = entry
        state.num_on[link] += 1


@compiled()
def _end(network: Any, state: Any, flow: int, at: float) -> None:
    """End a flow: count down its gates, and let the flow that follows it start."""
    state.left[flow], state.times[1, flow] = 0.0, at
    state.numbers[_ENDED] += 1
    for i in range(3):
        gate = network.ends[flow, i]
        if gate >= 0:
            state.count[gate] -= 1
            if state.count[gate] == 0:
                state.numbers[_OPENING] = _push(
                    state.heap[0], state.heap[1], state.numbers[_OPENING], at + network.delay[gate], gate
                )
    if network.ends[flow, 3] >= 0:
        _release(state, network.ends[flow, 3])


@compiled()
def _release(state: Any, flow: int) -> None:
    """Note that one of the things that a flow waits for is there."""
    state.pending[flow] -= 1
    if state.pending[flow] == 0:
        state.ready[state.numbers[_READY]] = flow
        state.numbers[_READY] += 1


@compiled()
def _start_all(network: Any, state: Any, now: float) -> None:
    """Open the gates that are due, and start all flows that may start."""
    numbers = state.numbers
    while numbers[_READY] > 0 or (numbers[_OPENING] > 0 and state.heap[0, 0] <= now):
        if numbers[_READY] > 0:
            numbers[_READY] -= 1
            _start(network, state, state.ready[numbers[_READY]], now)
            continue
        gate = int(state.heap[1, 0])
        numbers[_OPENING] = _pop(state.heap[0], state.heap[1], numbers[_OPENING])
        for i in range(network.gate_first[gate], network.gate_first[gate + 1]):
            _release(state, network.gate_flows[i])


@compiled()
def _move(network: Any, state: Any, samples: Any, width: float, now: float, until: float) -> None:
    """Move bytes until a time; flows that have none left end, each at its own time."""
    first, links, i = network.first, network.links, 0
    while i < state.numbers[_ACTIVE]:
        flow = state.active[i]
        needed = state.left[flow] / state.rate[flow]
        if needed > (until - now) * (1.0 + _ROUNDING) + _ROUNDING * until:
            state.left[flow] -= state.rate[flow] * (until - now)
            i += 1
            continue
        ended = min(now + needed, until)
        at = min(int(ended / width), len(samples) - 1)
        state.numbers[_ACTIVE] -= 1
        state.active[i] = state.active[state.numbers[_ACTIVE]]
        for entry in range(first[flow], first[flow + 1]):
            link = links[entry]
            state.of_links[0, link] += network.num_bytes[flow]
            samples[at, link] -= state.rate[flow] * (until - ended)
            state.num_on[link] -= 1
            last = state.slots[state.begin[link] + state.num_on[link]]
            state.slots[state.place[entry]], state.place[last] = last, state.place[entry]
        _end(network, state, flow, ended)


@compiled()
def _begin(network: Any, state: Any) -> None:
    """Note gates and flows that wait for nothing."""
    numbers = state.numbers
    for gate in range(len(state.count)):
        if state.count[gate] == 0:
            numbers[_OPENING] = _push(state.heap[0], state.heap[1], numbers[_OPENING], network.delay[gate], gate)
    for flow in range(len(state.pending)):
        if state.pending[flow] == 0:
            state.ready[numbers[_READY]] = flow
            numbers[_READY] += 1


@compiled()
def run_flows(network: Any, state: Any, quantum: float, width: float, samples: Any) -> float:
    """Run all flows; returns the width of samples, which is ``width`` at first.

    Rates are updated whenever flows start or end, but ``quantum`` apart at least: flows that end in between end at
    the right time, and what they leave is taken up at the next update. Results are in ``state`` and in ``samples``,
    float64 (B, L), the bytes of each link in each sample.
    """
    numbers, now = state.numbers, 0.0
    _begin(network, state)
    while True:
        _start_all(network, state, now)
        if numbers[_ACTIVE] == 0:
            if numbers[_OPENING] == 0:
                return width
            now = state.heap[0, 0]
            continue
        _fill(network, state)
        numbers[_UPDATES] += 1
        until = np.inf
        for i in range(numbers[_ACTIVE]):
            until = min(until, state.left[state.active[i]] / state.rate[state.active[i]])
        until = now + until + quantum
        if numbers[_OPENING] > 0:
            until = max(min(until, state.heap[0, 0]), now)
        used = network.capacity - state.work[0]
        for link in range(len(used)):
            used[link] = used[link] if state.num_on[link] else 0.0
            state.of_links[1, link] = max(state.of_links[1, link], used[link])
        width = _sample(samples, width, now, until, used)
        _move(network, state, samples, width, now, until)
        now = until


def new_state(network: Network, pending: Any, count: Any) -> State:
    """Return the state before the first flow starts."""
    num_flows, num_links, num_entries = len(network.weight), len(network.capacity), len(network.links)
    on_link = np.bincount(network.links, minlength=num_links)
    return State(
        pending=pending.astype(np.int64),
        count=count.astype(np.int64),
        left=network.num_bytes.copy(),
        rate=np.zeros(num_flows),
        heap=np.zeros((2, len(count) + 1)),
        active=np.zeros(num_flows, np.int64),
        ready=np.zeros(num_flows, np.int64),
        slots=np.zeros(num_entries, np.int64),
        begin=np.append(0, on_link.cumsum())[:-1].astype(np.int64),
        num_on=np.zeros(num_links, np.int64),
        place=np.zeros(num_entries, np.int64),
        flow_of=np.repeat(np.arange(num_flows), np.diff(network.first)),
        work=np.zeros((5, num_links)),
        numbers=np.zeros(5, np.int64),
        times=np.zeros((2, num_flows)),
        of_links=np.zeros((2, num_links)),
    )
