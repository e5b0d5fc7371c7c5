"""Streams, events and device memory without a GPU: what is launched runs in any order that streams and events allow.

Hosts are threads of which one runs at a time, until it waits. A seed chooses which host or stream goes on, and how much
each is favoured, so that any of them may lag far behind. Memory is never given back, is filled with rubbish when it is
allocated, and an access beyond its end raises.
"""

from __future__ import annotations

import bisect
import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock
from weakref import WeakValueDictionary

import torch
from native_functions import Native
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusco.bench.host.null_device import NullEvent, NullGpu, NullStream

RUBBISH = 0xA5
CPU = torch.device("cpu")
END_OF_KERNEL = "the end of "
_FAVOURS = (1, 8, 64)


def always() -> bool:
    return True


class Over(BaseException):
    """Ends the host threads when one of them has failed."""


class Event(NullEvent):
    """Event that is reached when its stream comes to it."""

    by_handle: ClassVar[WeakValueDictionary[int, Event]] = WeakValueDictionary()

    def __init__(self) -> None:
        self._is_reached: list[bool] = [True]
        self.cuda_event = id(self)
        self.by_handle[self.cuda_event] = self

    def record(self, stream: Stream) -> None:
        reached = self._is_reached = [False]
        stream.launch("an event", lambda: reached.__setitem__(0, True))

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self)

    def query(self) -> bool:
        return self._is_reached[0]

    @property
    def mark(self) -> Callable[[], bool]:
        """Whether it is reached as it was last recorded, whatever is recorded later."""
        reached = self._is_reached
        return lambda: reached[0]


class Stream(NullStream):
    """Stream that does what is launched when a machine has it go on."""

    def __init__(self, handle: int, favour: int) -> None:
        self.cuda_stream, self.favour = handle, favour
        self.queue: deque[tuple[str, Callable[[], bool], Callable[[], None]]] = deque()

    def launch(self, what: str, act: Callable[[], None], is_ready: Callable[[], bool] = always) -> None:
        self.queue.append((what, is_ready, act))

    def launch_early(self, what: str, act: Callable[[], None]) -> None:
        """Before the end of the kernel that was launched last, if nothing was launched since."""
        is_behind_kernel = self.queue and self.queue[-1][0].startswith(END_OF_KERNEL)
        self.queue.insert(len(self.queue) - bool(is_behind_kernel), (what, always, act))

    def wait_event(self, event: Event) -> None:
        self.launch("waiting for an event", lambda: None, event.mark)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    @property
    def is_idle(self) -> bool:
        return not self.queue

    def is_ready(self) -> bool:
        return bool(self.queue) and self.queue[0][1]()

    def go_on(self) -> None:
        self.queue.popleft()[2]()


def driver_functions(machine: Machine) -> dict[str, Native]:
    """Functions of the driver, on the events and streams of a machine."""

    def record(event: int, stream: int) -> None:
        Event.by_handle[event].record(machine.stream_of(stream))

    def wait(stream: int, event: int) -> None:
        machine.stream_of(stream).wait_event(Event.by_handle[event])

    return {"cuEventRecord": Native(record, 2), "cuStreamWaitEvent": Native(wait, 2)}


class Host:
    """One rank's thread."""

    def __init__(self, rank: int, favour: int, function: Callable[[int], Any], machine: Machine) -> None:
        self.favour, self.is_done, self.result, self.error = favour, False, None, None
        self.is_ready: Callable[[], bool] = always
        self._rank, self._function, self._machine = rank, function, machine
        self._turn, self._is_back = threading.Lock(), threading.Lock()  # held until its turn
        self._turn.acquire()
        self._is_back.acquire()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def go_on(self) -> None:
        self._turn.release()
        self._is_back.acquire()

    def wait(self, is_ready: Callable[[], bool]) -> None:
        self.is_ready = is_ready
        self._is_back.release()
        self._turn.acquire()
        if self._machine.is_over:
            raise Over

    def end(self) -> None:
        self._turn.release()
        self.thread.join()

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if not self._machine.is_over:
                self.result = self._function(self._rank)
        except Over:
            pass
        except BaseException as error:  # noqa: BLE001  raised in the caller
            self.error = error
        self.is_done = True
        self._is_back.release()


class Machine:
    """All devices and hosts of a simulation."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._streams: list[Stream] = []
        self._hosts: list[Host] = []
        self._current: Host | None = None
        self._starts: list[int] = []
        self._memory: dict[int, torch.UntypedStorage] = {}
        self.is_over = False
        self.processor: Any = None  # runs kernels that are more than one step; see ``Emulator``

    def new_stream(self) -> Stream:
        self._streams.append(Stream(len(self._streams) + 1, self._random.choice(_FAVOURS)))
        return self._streams[-1]

    def stream_of(self, handle: int) -> Stream:
        return self._streams[handle - 1]

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Have others go on until a condition holds; for hosts."""
        assert self._current
        self._current.wait(is_ready)

    def run(self, function: Callable[[int], Any], num_ranks: int) -> list[Any]:
        """Call a function on every rank, and finish what it launches; returns the results."""
        favours = self._random.choices(_FAVOURS, k=num_ranks)
        self._hosts = [Host(rank, favour, function, self) for rank, favour in enumerate(favours)]
        try:
            while self._go_on():
                pass
        finally:
            self.is_over = True
            for host in self._hosts:
                host.end()
        return [host.result for host in self._hosts]

    def _go_on(self) -> bool:
        hosts = [host for host in self._hosts if not host.is_done]
        processors = [self.processor] if self.processor else []
        ready = [actor for actor in (*hosts, *self._streams, *processors) if actor.is_ready()]
        if not ready:
            stuck = [f"stream {stream.cuda_stream} at {stream.queue[0][0]}" for stream in self._streams if stream.queue]
            if hosts or stuck:
                raise AssertionError(f"{len(hosts)} hosts wait for ever, and {', '.join(stuck) or 'no stream'}")
            return False
        chosen: Any = self._random.choices(ready, [actor.favour for actor in ready])[0]
        if self.processor and chosen is not self.processor:
            self.processor.look_again()
        if isinstance(chosen, Host):
            self._current = chosen
            chosen.go_on()
            if chosen.error:
                raise chosen.error
        else:
            chosen.go_on()
        return True

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a tensor's memory known."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and address not in self._memory:
            self._memory[address] = storage
            bisect.insort(self._starts, address)
        return tensor

    def at(self, address: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the bytes at an address."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if not num_bytes:
            return torch.empty(*shape, dtype=dtype)
        place = bisect.bisect_right(self._starts, address) - 1
        end = self._starts[place] + self._memory[self._starts[place]].nbytes() if place >= 0 else 0
        assert address + num_bytes <= end, f"{num_bytes} bytes at {address:#x} are not all allocated"
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).view(*shape)


class At:
    """Replaces ``torch.cuda.StreamContext``, which can be entered again."""

    def __init__(self, gpu: SimulatedGpu, stream: Stream) -> None:
        self._gpu, self._stream = gpu, stream

    def __enter__(self) -> Stream:
        self._before, self._gpu.stream = self._gpu.stream, self._stream
        return self._stream

    def __exit__(self, *_: object) -> None:
        self._gpu.stream = self._before


class SimulatedGpu(NullGpu):
    """Streams of a machine, one of which is current; notes the streams that memory is recorded on."""

    new_event = Event

    def __init__(self, machine: Machine, device: torch.device = CPU) -> None:
        super().__init__(device)
        self.machine, self.stream = machine, machine.new_stream()
        self.current_handle = lambda _: self.stream.cuda_stream
        self._readers: dict[int, set[int]] = {}

    def new_stream(self, *_: object, **__: object) -> Stream:
        return self.machine.new_stream()

    def on(self, stream: Stream) -> At:
        return At(self, stream)

    def reads(self, tensor: torch.Tensor) -> set[int]:
        """Handles of the streams that a tensor's memory was recorded on."""
        return self._readers.get(tensor.untyped_storage().data_ptr(), set())

    @contextmanager
    def installed(self) -> Iterator[SimulatedGpu]:
        """What the public interface asks PyTorch for is this device's."""

        def record(tensor: torch.Tensor, stream: Stream) -> None:
            self._readers.setdefault(tensor.untyped_storage().data_ptr(), set()).add(stream.cuda_stream)

        with (
            mock.patch.multiple(torch.cuda, Event=Event, current_stream=lambda *_: self.stream),
            mock.patch.object(torch.Tensor, "record_stream", record),
        ):
            yield self


class OnDevice(TorchDispatchMode):
    """Operations of PyTorch's come after what is on a stream, for which the host waits; their memory is kept."""

    def __init__(self, machine: Machine, stream: Stream) -> None:
        super().__init__()
        self._machine, self._stream = machine, stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_allocation = "empty" in func.name()
        if not (func.is_view or is_allocation or self._stream.is_idle):
            self._machine.wait(lambda: self._stream.is_idle)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._machine.keep(tensor)
                if is_allocation and tensor.numel():
                    tensor.view(-1).view(torch.uint8).fill_(RUBBISH)
        return result
