"""GPUs of a host in virtual time: streams, events, contexts and memory, PCIe links and NVLink of given speeds.

It has the methods of ``CudaDriver`` and the functions that ``mover.c`` calls. A copy moves its bytes when it ends, so a
buffer that is reused too early shows. What a driver would refuse is noted in ``faults``.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import itertools
from pathlib import Path

from fusco.offload.driver import CALLS, NOT_READY, TYPES, DriverTable
from fusco.offload.settings import Machine

PCIE, NVLINK = 54.3e9, 370e9
GB = 1 << 30
ILLEGAL_ADDRESS = 700
CONTEXT_BYTES = 512 << 20


class SimulatedLinks:
    def __init__(self, num_gpus, free_bytes=100 * GB):
        self.bits_per_s, self.free = (0,) * num_gpus, [free_bytes] * num_gpus
        self.has_nvlink = lambda link, peer: True

    def index_of(self, bus_id):
        return int(bus_id)

    def free_bytes(self, link):
        return self.free[link]


class SimulatedGpus:
    """``moves_bytes``: addresses are real memory; otherwise any numbers, device d's from (d + 1) << 40."""

    def __init__(self, num_gpus, *, moves_bytes=False, pcie=PCIE, call_ns=0):
        self.num_gpus, self.moves_bytes, self.pcie, self.call_ns = num_gpus, moves_bytes, pcie, call_ns
        self.links = SimulatedLinks(num_gpus)
        self.now_ns, self.faults, self.error = 10**12, [], 0
        self._ids, self._pending = itertools.count(1), []
        self.contexts, self.streams, self.tails, self.events = {}, {}, {}, {}
        self.event_contexts, self.buffers, self.accesses = {}, {}, set()
        self._busy, self._stack, self._current = {}, [], None
        self.copied = []  # (kind, to, from, bytes) in the order of the calls
        self._functions = {name: TYPES[name](self._guard(getattr(self, f"_{name}"))) for name in CALLS}

    def machine(self, board: Path, current_stream, *, has_threads=False) -> Machine:
        return Machine(self, lambda: self.links, lambda: board, current_stream, has_threads)

    # What CudaDriver has.

    def table(self):
        now = TYPES["now"](lambda: self.now_ns)
        self._functions["now"] = now
        return DriverTable(**self._functions)

    def retain(self, device):
        context = 1000 + device
        self.contexts[context] = self.contexts.get(context, 0) + 1
        if self.contexts[context] == 1 and device:
            self.links.free[device] -= CONTEXT_BYTES
        return context

    def release(self, device):
        context = 1000 + device
        self.contexts[context] -= 1
        if not self.contexts[context] and device:
            self.links.free[device] += CONTEXT_BYTES
            self._expect(context not in self.streams.values(), "a context with streams was released")

    @contextlib.contextmanager
    def current(self, context):
        self._stack.append(self._current)
        self._current = context
        yield
        self._current = self._stack.pop()

    def can_access(self, device, peer):
        return device != peer

    def enable_access(self, peer_context):
        self.accesses.add((self._current, peer_context))

    def new_stream(self):
        stream = next(self._ids)
        self.streams[stream], self.tails[stream] = self._current, 0
        return stream

    def free_stream(self, stream):
        del self.streams[stream]

    def new_event(self):
        event = next(self._ids)
        self.event_contexts[event], self.events[event] = self._current, 0
        return event

    def free_event(self, event):
        del self.event_contexts[event]

    def allocate(self, num_bytes):
        self.links.free[self._current - 1000] -= num_bytes
        address = ((self._current - 999) << 40) + (next(self._ids) << 32)
        if self.moves_bytes:
            memory = ctypes.create_string_buffer(num_bytes)
            address = ctypes.addressof(memory)
            self.buffers[address] = (memory, num_bytes, self._current)
        else:
            self.buffers[address] = (None, num_bytes, self._current)
        return address

    def free(self, address):
        _, num_bytes, context = self.buffers.pop(address)
        self.links.free[context - 1000] += num_bytes

    def bus_id(self, device):
        return str(device)

    def num_devices(self):
        return self.num_gpus

    def copy(self, direction, device, host, num_bytes, stream):
        assert (
            self._from_host(device, host, num_bytes, stream)
            if direction
            else self._to_host(host, device, num_bytes, stream)
        ) == 0

    def record(self, event, stream):
        assert self._record(event, stream) == 0

    def wait(self, stream, event):
        assert self._wait(stream, event, 0) == 0

    def is_complete(self, event):
        return self._query(event) == 0

    def error_name(self, code):
        return f"CUDA_ERROR_ILLEGAL_ADDRESS ({code})"

    # Time.

    def advance(self, least_ns=1_000):
        """Go on to the end of the next copy, at least by ``least_ns``."""
        self.now_ns = max(self.now_ns + least_ns, self._pending[0][0] if self._pending else 0)
        self._move()

    def work(self, stream, seconds):
        """Keep a stream busy."""
        self.tails[stream] = max(self.tails[stream], self.now_ns) + int(1e9 * seconds)

    def _move(self):
        while self._pending and self._pending[0][0] <= self.now_ns:
            _, _, to, source, num_bytes = heapq.heappop(self._pending)
            if self.moves_bytes:
                ctypes.memmove(to, source, num_bytes)

    # What mover.c calls.

    def _guard(self, function):
        def call(*arguments):
            self.now_ns += self.call_ns
            if self.error:
                return self.error
            try:
                return function(*arguments)
            except Exception as error:  # noqa: BLE001  ctypes would print it and return 0
                self.faults.append(repr(error))
                return ILLEGAL_ADDRESS

        return call

    def _expect(self, holds, fault):
        if not holds:
            self.faults.append(fault)

    def _set_context(self, context):
        self._expect(context in self.contexts, f"context {context} does not exist")
        self._current = context
        return 0

    def _to_host(self, host, device, num_bytes, stream):
        gpu = self.streams[stream] - 1000
        self._owns(gpu, device, num_bytes)
        return self._enqueue(("to host", gpu), self.pcie, host, device, num_bytes, stream)

    def _from_host(self, device, host, num_bytes, stream):
        gpu = self.streams[stream] - 1000
        self._owns(gpu, device, num_bytes)
        return self._enqueue(("from host", gpu), self.pcie, device, host, num_bytes, stream)

    def _between(self, to, source, num_bytes, stream):
        gpu = self.streams[stream] - 1000
        relay = next(c - 1000 for a, (_, n, c) in self.buffers.items() for b in (to, source) if a <= b < a + n)
        self._expect((1000 + gpu, 1000 + relay) in self.accesses, f"GPU {gpu} has no access to GPU {relay}")
        return self._enqueue(("nvlink", gpu), NVLINK, to, source, num_bytes, stream)

    def _launch(self, *_):
        return ILLEGAL_ADDRESS

    def _record(self, event, stream):
        self._expect(self.event_contexts[event] == self.streams[stream], "an event of another context was recorded")
        self.events[event] = self.tails[stream]
        return 0

    def _query(self, event):
        self._move()
        return 0 if self.events[event] <= self.now_ns else NOT_READY

    def _wait(self, stream, event, flags):
        self.tails[stream] = max(self.tails[stream], self.events[event])
        return 0

    def _owns(self, gpu, device, num_bytes):
        buffers = {a: (n, c) for a, (_, n, c) in self.buffers.items() if a <= device < a + n}
        for address, (size, context) in buffers.items():
            self._expect(context == 1000 + gpu and device + num_bytes <= address + size, "a relay buffer is not there")

    def _enqueue(self, wire, bytes_per_s, to, source, num_bytes, stream):
        if self._current is not None:
            self._expect(self.streams[stream] == self._current, "a stream of another context was used")
        start = max(self.tails[stream], self._busy.get(wire, 0), self.now_ns)
        end = start + int(1e9 * num_bytes / bytes_per_s)
        self.tails[stream] = self._busy[wire] = end
        self.copied.append((wire[0], wire[1], to, source, num_bytes, end))
        heapq.heappush(self._pending, (end, next(self._ids), to, source, num_bytes))
        return 0
