"""The NCCL plugin without NCCL: driven by ctypes as NCCL's proxy thread drives it, with an endpoint's interface."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint64, c_ulong, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from fusco.core.errors import FuscoError
from fusco.rails import Rail
from fusco.rails.channel import as_bytes
from fusco.rails.nccl import nccl_plugin

HANDLE_BYTES, HOST_POINTERS = 128, 1
SUCCESS, SYSTEM_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = 0, 2, 4, 5, 6
_POLL_S = 50e-6
_CONNECT_S = 60.0

_P, _PP, _IP = c_void_p, POINTER(c_void_p), POINTER(c_int)
LOGGER = ctypes.CFUNCTYPE(None, c_int, c_ulong, c_char_p, c_int, c_char_p, c_char_p)


def _function(*arguments: Any) -> Any:
    return ctypes.CFUNCTYPE(c_int, *arguments)


class Table(ctypes.Structure):
    """``ncclNet_v11_t``."""

    _fields_ = (
        ("name", c_char_p),
        ("init", _function(_PP, c_uint64, _P, LOGGER, _P)),
        ("devices", _function(_IP)),
        ("getProperties", _function(c_int, _P)),
        ("listen", _function(_P, c_int, _P, _PP)),
        ("connect", _function(_P, c_int, _P, _PP, _PP)),
        ("accept", _function(_P, _PP, _PP)),
        ("regMr", _function(_P, _P, c_size_t, c_int, _PP)),
        ("regMrDmaBuf", _function(_P, _P, c_size_t, c_int, c_uint64, c_int, _PP)),
        ("deregMr", _function(_P, _P)),
        ("isend", _function(_P, _P, c_size_t, c_int, _P, _P, _PP)),
        ("irecv", _function(_P, c_int, _PP, POINTER(c_size_t), _IP, _PP, _PP, _PP)),
        ("iflush", _function(_P, c_int, _PP, _IP, _PP, _PP)),
        ("test", _function(_P, _IP, _IP)),
        ("closeSend", _function(_P)),
        ("closeRecv", _function(_P)),
        ("closeListen", _function(_P)),
        ("getDeviceMr", c_void_p),
        ("irecvConsumed", c_void_p),
        ("makeVDevice", c_void_p),
        ("finalize", _function(_P)),
        ("setNetAttr", c_void_p),
    )


class PluginError(FuscoError):
    """A function of the plugin has returned an error; ``code`` is NCCL's number for it."""

    def __init__(self, code: int, log: Sequence[str]) -> None:
        self.code = code
        super().__init__(f"error {code} of the plugin; its log: {'; '.join(log[-3:])}")


class Plugin:
    """The plugin, loaded and initialised; ``log`` has what it has said."""

    def __init__(self, path: str) -> None:
        self.log: list[str] = []
        self.logger = LOGGER(lambda *line: self.log.append(line[-1].decode()))
        self.load(ctypes.CDLL(path))

    def load(self, library: ctypes.CDLL) -> None:
        """Find the table of the library, and initialise the plugin."""
        self.table: Any = Table.in_dll(library, "ncclNetPlugin_v11")
        self.call(self.table.init, ctypes.byref(c_void_p()), 1, None, self.logger, None)

    def call(self, function: Callable[..., int], *arguments: Any) -> None:
        """Call a function of the table; ``PluginError`` if it returns an error."""
        if code := function(*arguments):
            raise PluginError(code, self.log)

    def listen(self) -> tuple[ctypes.Array[Any], c_void_p]:
        """Return a handle and a listen comm."""
        handle, comm = ctypes.create_string_buffer(HANDLE_BYTES), c_void_p()
        self.call(self.table.listen, None, 0, handle, ctypes.byref(comm))
        return handle, comm

    def connect(self, handle: ctypes.Array[Any]) -> c_void_p:
        """Return a send comm, once it is connected."""
        return self.established("connect", None, 0, handle)

    def accept(self, listen: c_void_p) -> c_void_p:
        """Return a receive comm, once a peer has connected it."""
        return self.established("accept", listen)

    def finalize(self) -> None:
        """End the plugin's threads, as NCCL does with the last communicator."""
        self.call(self.table.finalize, None)

    def established(self, verb: str, *arguments: Any) -> c_void_p:
        """Call a function of the table until it returns a comm, and return that."""
        end, comm = time.monotonic() + _CONNECT_S, c_void_p()
        while not comm.value:
            self.call(getattr(self.table, verb), *arguments, ctypes.byref(comm), None)
            if time.monotonic() > end:
                raise TimeoutError(f"{verb} has not finished within {_CONNECT_S:g} s; log: {self.log[-3:]}")
            time.sleep(_POLL_S)
        return comm


class PluginRequest:
    """A send or receive, like ``fusco.rails.Request``."""

    def __init__(self, memory: memoryview) -> None:
        self._array = np.frombuffer(memory, np.uint8)  # keeps the memory, and knows its address
        self.address, self.size, self.handle = self._array.ctypes.data, self._array.nbytes, c_void_p()
        self.num_bytes, self.finished_s, self.error = 0, 0.0, PluginError(SUCCESS, ())
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """True once it was delivered, or cannot be."""
        return self._done.is_set()

    def finish(self, num_bytes: int, error: PluginError | None = None) -> None:
        """Say that it has finished."""
        self.num_bytes, self.finished_s, self.error = num_bytes, time.monotonic(), error or self.error
        self._done.set()

    def wait(self, timeout_s: float = 60.0) -> int:
        """Wait and return the bytes of the message; ``PluginError`` if it failed."""
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"a request of {self.size} bytes has not finished within {timeout_s:g} s")
        if self.error.code:
            raise self.error
        return self.num_bytes


class PluginChannel:
    """A send comm or a receive comm, like ``fusco.rails.Channel`` in one direction."""

    def __init__(self, plugin: Plugin, comm: c_void_p, *, is_sender: bool) -> None:
        self.plugin, self.comm, self._is_sender = plugin, comm, is_sender
        self._waiting, self._posted = deque[PluginRequest](), deque[PluginRequest]()

    def isend(self, buffer: Any) -> PluginRequest:
        """Send a buffer."""
        assert self._is_sender, "this end receives"
        return self._add(PluginRequest(as_bytes(buffer, writable=False)))

    def irecv(self, buffer: Any) -> PluginRequest:
        """Receive into a buffer."""
        assert not self._is_sender, "this end sends"
        return self._add(PluginRequest(as_bytes(buffer, writable=True)))

    def progress(self) -> None:
        """Post what waits and test what was posted, as NCCL's proxy thread does again and again."""
        while self._waiting and self._post(self._waiting[0]):
            self._posted.append(self._waiting.popleft())
        for request in [each for each in self._posted if self._test(each)]:
            self._posted.remove(request)

    def close(self) -> None:
        """Close the comm."""
        table = self.plugin.table
        self.plugin.call(table.closeSend if self._is_sender else table.closeRecv, self.comm)

    def _add(self, request: PluginRequest) -> PluginRequest:
        self._waiting.append(request)
        return request

    def _post(self, request: PluginRequest) -> bool:
        """Post a request; false if the plugin has no room for it now."""
        data, handle, table = c_void_p(request.address), ctypes.byref(request.handle), self.plugin.table
        if self._is_sender:
            code = table.isend(self.comm, data, request.size, 0, None, None, handle)
        else:
            size, tag = c_size_t(request.size), c_int(0)
            refs = (ctypes.byref(each) for each in (data, size, tag))
            code = table.irecv(self.comm, 1, *refs, None, None, handle)
        if code:
            request.finish(0, PluginError(code, self.plugin.log))
        return bool(code or request.handle.value)

    def _test(self, request: PluginRequest) -> bool:
        if request.done:
            return True
        done, size = c_int(), c_int()
        code = self.plugin.table.test(request.handle, ctypes.byref(done), ctypes.byref(size))
        if code or done.value:
            request.finish(size.value, PluginError(code, self.plugin.log) if code else None)
        return bool(code or done.value)


class PluginEndpoint:
    """The plugin of this process, like ``fusco.rails.Endpoint``; its thread plays NCCL's proxy thread."""

    def __init__(self, *, worker: int, rails: Sequence[Rail], board: Path, policy: str) -> None:
        chosen = nccl_plugin(rails, worker=worker, limits=None, board=board, policy=policy)
        os.environ.update(chosen)  # the plugin has no other configuration
        self.plugin = Plugin(chosen["NCCL_NET_PLUGIN"])
        self.channels: list[PluginChannel] = []
        self._listens = deque[c_void_p]()
        threading.Thread(target=self._run, daemon=True).start()

    def listen(self) -> bytes:
        """Return the handle for the next peer."""
        handle, comm = self.plugin.listen()
        self._listens.append(comm)
        return handle.raw

    def connect(self, handle: bytes) -> PluginChannel:
        """Connect to a peer and return the channel, which sends."""
        comm = self.plugin.connect(ctypes.create_string_buffer(handle, HANDLE_BYTES))
        return self._add(PluginChannel(self.plugin, comm, is_sender=True))

    def accept(self) -> PluginChannel:
        """Return the channel that a peer has connected, which receives."""
        listen = self._listens.popleft()
        comm = self.plugin.accept(listen)
        self.plugin.call(self.plugin.table.closeListen, listen)
        return self._add(PluginChannel(self.plugin, comm, is_sender=False))

    def _add(self, channel: PluginChannel) -> PluginChannel:
        self.channels.append(channel)
        return channel

    def _run(self) -> None:
        while True:
            for channel in list(self.channels):
                channel.progress()
            time.sleep(_POLL_S)
