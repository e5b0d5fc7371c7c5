"""Max-min fair rates of flows over links, in time: progressive filling at every start and end of a flow.

A flow uses all of its links at once. Rates are weighted max-min fair: on its bottleneck a flow has the part of the link
that its weight is of the weights there. Checked against SimGrid's model of networks (CM02 without latencies).

Shape symbols: F flows, L links, G gates, P entries of all routes, B samples.
"""

from __future__ import annotations

from typing import Any

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


@compiled()
def fill(first: Any, links: Any, weight: Any, active: Any, on_link: Any, rate: Any, capacity: Any, work: Any) -> None:
    """Set ``rate`` of the active flows; ``work[0]`` is what remains of each link.

    Step 1: each link's share is its capacity over the weights of its flows. Step 2: the link with the least share is
    full: its flows have that share, which is taken off their other links. Step 3: repeat with the flows that are left.

    Args:
        first, links: int64 (F + 1,) and (P,), the links of flow ``f`` are ``links[first[f] : first[f + 1]]``.
        weight: float64 (F,), of each flow.
        active: int64 (number of active flows,).
        on_link: three int64 arrays: entries of each link's active flows, (P,), from ``begin[link]`` on, (L + 1,); the
            flow of each entry, (P,).
        rate: float64 (F,), result.
        capacity: float64 (L,).
        work: float64 (5, L), scratch: capacity and weight left, keys and items of the heap, number of flows.
    """
    left, load, keys, items, count = work[0], work[1], work[2], work[3], work[4]
    left[:], load[:], count[:] = capacity, 0.0, 0.0
    for i in range(len(active)):
        flow = active[i]
        rate[flow] = -1.0
        for entry in range(first[flow], first[flow + 1]):
            load[links[entry]] += weight[flow]
            count[links[entry]] += 1.0
        if first[flow] == first[flow + 1]:
            rate[flow] = np.inf
    size = 0
    for link in range(len(capacity)):
        if count[link] > 0:
            size = _push(keys, items, size, left[link] / load[link], link)
    slots, begin, flow_of = on_link
    while size > 0:
        key, link = keys[0], int(items[0])
        size = _pop(keys, items, size)
        if count[link] < 0.5:
            continue
        share = max(left[link], 0.0) / load[link]
        if share > key * (1.0 + _ROUNDING):
            size = _push(keys, items, size, share, link)
            continue
        at = begin[link]
        remaining = count[link]
        while remaining > 0.5:
            flow = flow_of[slots[at]]
            at += 1
            if rate[flow] >= 0.0:
                continue
            rate[flow] = share * weight[flow]
            remaining -= 1.0
            for entry in range(first[flow], first[flow + 1]):
                other = links[entry]
                left[other] -= rate[flow]
                load[other] -= weight[flow]
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
def _add_to_links(flow: int, first: Any, links: Any, on_link: Any, num_on: Any, place: Any) -> None:
    slots, begin, _ = on_link
    for entry in range(first[flow], first[flow + 1]):
        link = links[entry]
        place[entry] = begin[link] + num_on[link]
        slots[place[entry]] = entry
        num_on[link] += 1


@compiled()
def _take_off_links(flow: int, first: Any, links: Any, on_link: Any, num_on: Any, place: Any) -> None:
    slots, begin, _ = on_link
    for entry in range(first[flow], first[flow + 1]):
        link = links[entry]
        num_on[link] -= 1
        last = slots[begin[link] + num_on[link]]
        slots[place[entry]], place[last] = last, place[entry]


@compiled()
def _finish(flow: int, at: float, ends: Any, count: Any, delay: Any, heap: Any, size: int) -> int:
    """Count down the gates of a flow that has ended; returns the size of the heap of gates that will open."""
    for i in range(ends.shape[1]):
        gate = ends[flow, i]
        if gate >= 0:
            count[gate] -= 1
            if count[gate] == 0:
                size = _push(heap[0], heap[1], size, at + delay[gate], gate)
    return size


@compiled()
def run_flows(
    first: Any,
    links: Any,
    sizes: Any,
    starts: Any,
    ends: Any,
    gates: Any,
    capacity: Any,
    quantum: float,
    width: float,
    times: Any,
    of_links: Any,
    samples: Any,
) -> Any:
    """Run all flows; returns the number of flows that ended, the number of updates of rates and the samples' width.

    Args:
        first, links: as in ``fill``.
        sizes: float64 (2, F), bytes and weight of each flow.
        starts: three int64 arrays: the flows of gate ``g`` are ``flows[first[g] : first[g + 1]]``: ``first`` (G + 1,),
            ``flows``; and the gates and flows that each flow waits for, (F,), which are counted down.
        ends: int64 (F, 4), three gates that a flow counts down, and the flow that follows it; -1 for none.
        gates: float64 (2, G), flows that a gate waits for, and the time from the last of them until it opens.
        capacity: float64 (L,), bytes in a unit of time.
        quantum: rates are updated at most this often; flows that end in between end at the right time.
        width: time of a sample at first.
        times: float64 (2, F), result: start and end of each flow.
        of_links: float64 (2, L), result: bytes and the highest rate of each link.
        samples: float64 (B, L), result: bytes of each link in each sample.
    """
    num_flows, num_links, num_gates = len(first) - 1, len(capacity), gates.shape[1]
    gate_first, gate_flows, pending = starts
    on_link = (np.empty(len(links), np.int64), np.zeros(num_links + 1, np.int64), np.empty(len(links), np.int64))
    slots, begin, flow_of = on_link
    for flow in range(num_flows):
        for entry in range(first[flow], first[flow + 1]):
            flow_of[entry] = flow
            begin[links[entry] + 1] += 1
    for link in range(num_links):
        begin[link + 1] += begin[link]
    num_on, place = np.zeros(num_links, np.int64), np.empty(len(links), np.int64)
    work, rate = np.zeros((5, num_links)), np.zeros(num_flows)
    heap = np.zeros((2, num_gates + 1))
    left, weight = sizes[0].copy(), sizes[1]
    active, where = np.empty(num_flows, np.int64), np.full(num_flows, -1)
    ready, count = np.empty(num_flows, np.int64), gates[0].copy()
    num_active, num_done, num_ready, size, num_updates, now = 0, 0, 0, 0, 0, 0.0
    for gate in range(num_gates):
        if count[gate] == 0:
            size = _push(heap[0], heap[1], size, gates[1, gate], gate)
    for flow in range(num_flows):
        if pending[flow] == 0:
            ready[num_ready] = flow
            num_ready += 1
    while True:
        # Step 1: start what may start; flows without bytes or links end at once and may let others start.
        while num_ready > 0 or (size > 0 and heap[0, 0] <= now):
            if num_ready == 0:
                gate = int(heap[1, 0])
                size = _pop(heap[0], heap[1], size)
                for i in range(gate_first[gate], gate_first[gate + 1]):
                    pending[gate_flows[i]] -= 1
                    if pending[gate_flows[i]] == 0:
                        ready[num_ready] = gate_flows[i]
                        num_ready += 1
                continue
            num_ready -= 1
            flow = ready[num_ready]
            times[0, flow] = now
            if left[flow] > 0 and first[flow] < first[flow + 1]:
                active[num_active], where[flow] = flow, num_active
                num_active += 1
                _add_to_links(flow, first, links, on_link, num_on, place)
                continue
            times[1, flow] = now
            num_done += 1
            size = _finish(flow, now, ends[:, :3], count, gates[1], heap, size)
            follower = ends[flow, 3]
            if follower >= 0:
                pending[follower] -= 1
                if pending[follower] == 0:
                    ready[num_ready] = follower
                    num_ready += 1
        if num_active == 0:
            if size == 0:
                return num_done, num_updates, width
            now = heap[0, 0]
            continue
        # Step 2: rates, and the time until which they hold.
        fill(first, links, weight, active[:num_active], on_link, rate, capacity, work)
        num_updates += 1
        until = np.inf
        for i in range(num_active):
            until = min(until, left[active[i]] / rate[active[i]])
        until = now + until + quantum
        if size > 0:
            until = max(min(until, heap[0, 0]), now)
        used = capacity - work[0]
        for link in range(num_links):
            if num_on[link] == 0:
                used[link] = 0.0
            of_links[1, link] = max(of_links[1, link], used[link])
        width = _sample(samples, width, now, until, used)
        # Step 3: move bytes; flows that have none left end.
        i = 0
        while i < num_active:
            flow = active[i]
            needed = left[flow] / rate[flow]
            if needed > (until - now) * (1.0 + _ROUNDING) + 1e-12 * until:
                left[flow] -= rate[flow] * (until - now)
                i += 1
                continue
            ended = min(now + needed, until)
            at = min(int(ended / width), len(samples) - 1)
            for entry in range(first[flow], first[flow + 1]):
                of_links[0, links[entry]] += sizes[0, flow]
                samples[at, links[entry]] -= rate[flow] * (until - ended)
            left[flow], times[1, flow] = 0.0, ended
            num_done, num_active = num_done + 1, num_active - 1
            active[i] = active[num_active]
            _take_off_links(flow, first, links, on_link, num_on, place)
            size = _finish(flow, ended, ends[:, :3], count, gates[1], heap, size)
            follower = ends[flow, 3]
            if follower >= 0:
                pending[follower] -= 1
                if pending[follower] == 0:
                    ready[num_ready] = follower
                    num_ready += 1
        now = until
