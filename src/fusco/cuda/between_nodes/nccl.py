"""NCCL point-to-point messages between device memories, on given streams and with time limits.

PyTorch's process group is not used: it connects without a time limit, uses its own streams, and ends the process if a
peer fails. NCCL's non-blocking mode is not used either: in it, every launch costs the host a millisecond.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import cache
from threading import Lock
from typing import NamedTuple, TypeVar

import torch

from fusco.control.machine_calls import address_of
from fusco.control.member_gather import Gather
from fusco.core.errors import Stall, TransportError
from fusco.core.threads import in_thread
from fusco.cuda.kernels.abi import Number
from fusco.cuda.kernels.program import NativeCall

_Result = TypeVar("_Result")

_SUCCESS, _IN_PROGRESS = 0, 7
_INT8 = 0
_UNIQUE_ID_BYTES = 128
_LAUNCHING_S = 0.5  # longer than any launch that does not wait for a peer; source not recorded


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * _UNIQUE_ID_BYTES)]


_CONFIGURABLE_VERSION = 22800  # the first version whose config has nChannelsPerNetPeer
_UNDEFINED = -(2**31)


class _Config(ctypes.Structure):
    """``ncclConfig_t`` as of ``_CONFIGURABLE_VERSION``; later versions accept it, and append fields."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        *((name, ctypes.c_int) for name in ("blocking", "cgaClusterSize", "minCTAs", "maxCTAs")),
        ("netName", ctypes.c_char_p),
        *((name, ctypes.c_int) for name in ("splitShare", "trafficClass")),
        ("commName", ctypes.c_char_p),
        *((name, ctypes.c_int) for name in ("collnetEnable", "CTAPolicy", "shrinkShare", "nvlsCTAs")),
        *((name, ctypes.c_int) for name in ("nChannelsPerNetPeer", "nvlinkCentricSched")),
    ]

    @classmethod
    def of_channels(cls, num_channels: int) -> _Config:
        """Return NCCL's defaults, except for the channels per peer on another node."""
        config = cls(size=ctypes.sizeof(cls), magic=0xCAFEBEEF, version=_CONFIGURABLE_VERSION)
        for field in cls._fields_:
            if field[1] is ctypes.c_int:
                setattr(config, field[0], _UNDEFINED)
        config.nChannelsPerNetPeer = num_channels
        return config


class Message(NamedTuple):
    """Device memory to send to a rank, or to receive from it."""

    peer: int
    address: Number
    num_bytes: int


def num_bytes_of(messages: Sequence[Message]) -> int:
    """Return the bytes of all messages."""
    return sum(message.num_bytes for message in messages)


class NcclTransport:
    """NCCL communicator of all ranks. ``abort`` may be called from another thread."""

    def __init__(
        self,
        store_gather: Gather,
        device: torch.device,
        wait_until: Callable[[Callable[[], bool], Callable[[], Stall]], None],
        channels_per_peer: int | None = None,
    ) -> None:
        """Connect, together with all ranks; ``wait_until`` waits for a condition, and raises if a rank is missing.

        ``channels_per_peer`` is the number of NCCL channels to a rank of another node, where NCCL supports it and
        ``NCCL_NCHANNELS_PER_NET_PEER`` is not set; ``None`` leaves it to NCCL. Raises ``TransportError`` if NCCL fails.
        """
        self._nccl = _library()
        self._comm, self._lock = ctypes.c_void_p(), Lock()
        self._is_open, self._is_launching = True, False
        unique_id = _UniqueId()
        if store_gather.rank == 0:
            self._check(self._nccl.ncclGetUniqueId(ctypes.byref(unique_id)), "making an id")
        known = bytes.fromhex(store_gather.all_gather("nccl", bytes(unique_id).hex())[0])
        ctypes.memmove(ctypes.byref(unique_id), known, _UNIQUE_ID_BYTES)

        def connect() -> int:
            torch.cuda.set_device(device)  # of this thread
            arguments = (ctypes.byref(self._comm), store_gather.world_size, unique_id, store_gather.rank)
            result: int
            if channels_per_peer is None or self._version < _CONFIGURABLE_VERSION:
                result = self._nccl.ncclCommInitRank(*arguments)
            else:
                config = _Config.of_channels(channels_per_peer)
                result = self._nccl.ncclCommInitRankConfig(*arguments, ctypes.byref(config))
            return result

        # In a thread, since it waits for all ranks without a time limit.
        connecting = in_thread(connect, "connecting over NCCL")
        others = tuple(rank for rank in range(store_gather.world_size) if rank != store_gather.rank)
        stall = Stall("connecting over NCCL", others, "a connection to each", "not all")
        try:
            wait_until(connecting.done, lambda: stall)
        except BaseException:
            connecting.add_done_callback(lambda _: self.abort())  # it may still connect, and nobody else would free it
            raise
        self._check(connecting.result(), "connecting")

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], stream: int) -> None:
        """Launch one group of messages on a stream. The sends and receives of all ranks must match.

        The first messages between two ranks connect them, and each waits for the other. Does nothing after ``abort``,
        and returns soon if ``abort`` is called meanwhile.
        """
        if sends or receives:
            self.launch(lambda: self._launch(sends, receives, stream))

    def launch(self, call: Callable[[], _Result]) -> _Result | None:
        """Launch messages by a call, and return its result; ``None``, without an error, after or during ``abort``."""
        with self._lock:
            if not self._is_open:
                return None
            self._is_launching = True
        try:
            return call()
        except TransportError:
            if self._is_open:
                raise
            return None
        finally:
            self._is_launching = False

    def calls(self, sends: Sequence[Message], receives: Sequence[Message], stream: int) -> list[NativeCall]:
        """Return the calls of ``exchange``, to be made by a program in ``launch``."""

        def failing(what: str, *, is_inside: bool) -> Callable[[int], None]:
            def fail(result: int) -> None:
                if is_inside:
                    self._nccl.ncclGroupEnd()  # in an open group, NCCL would defer all later calls of this thread
                raise TransportError(f"NCCL failed in {what}: {self._text(result)}")

            return fail

        def of_messages(name: str, messages: Sequence[Message]) -> list[NativeCall]:
            function = address_of(getattr(self._nccl, name))
            return [
                NativeCall(
                    function,
                    (message.address, message.num_bytes, _INT8, message.peer, comm, stream),
                    failing(f"a message of {message.num_bytes} bytes with rank {message.peer}", is_inside=True),
                )
                for message in messages
            ]

        comm = self._comm.value or 0
        begin, end = (address_of(getattr(self._nccl, name)) for name in ("ncclGroupStart", "ncclGroupEnd"))
        return [
            NativeCall(begin, (), failing("beginning a group", is_inside=False)),
            *of_messages("ncclSend", sends),
            *of_messages("ncclRecv", receives),
            NativeCall(end, (), failing("launching messages", is_inside=False)),
        ]

    def _launch(self, sends: Sequence[Message], receives: Sequence[Message], stream: int) -> None:
        self._check(self._nccl.ncclGroupStart(), "beginning a group")
        try:
            for messages, call in ((sends, self._nccl.ncclSend), (receives, self._nccl.ncclRecv)):
                for message in messages:
                    result = call(message.address, message.num_bytes, _INT8, message.peer, self._comm, stream)
                    self._check(result, f"a message of {message.num_bytes} bytes with rank {message.peer}")
        except TransportError:
            self._nccl.ncclGroupEnd()  # in an open group, NCCL would defer all later calls of this thread
            raise
        self._check(self._nccl.ncclGroupEnd(), "launching messages")

    @property
    def failure(self) -> str:
        """NCCL's asynchronous error, or ``""``."""
        with self._lock:
            if not self._is_open:
                return ""
            state = ctypes.c_int()
            result = self._nccl.ncclCommGetAsyncError(self._comm, ctypes.byref(state)) or state.value
        return "" if result in (_SUCCESS, _IN_PROGRESS) else f"NCCL: {self._text(result)}"

    def abort(self) -> None:
        """Abort everything in flight, which leaves undefined data, and free resources. A second call does nothing."""
        with self._lock:
            if not (self._is_open and self._comm):
                return
            self._is_open = False
        # A launch returns at once, or it waits for a peer and only this ends it.
        deadline = time.monotonic() + _LAUNCHING_S
        while self._is_launching and time.monotonic() < deadline:
            time.sleep(_LAUNCHING_S / 100)
        self._nccl.ncclCommAbort(self._comm)

    def finish(self) -> None:
        """Free resources, together with all ranks, once nothing is in flight on any; then ``abort`` does nothing.

        No thread may launch messages meanwhile. Waits for all ranks, without a time limit.
        """
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
        self._nccl.ncclCommDestroy(self._comm)

    @property
    def _version(self) -> int:
        version = ctypes.c_int()
        self._check(self._nccl.ncclGetVersion(ctypes.byref(version)), "saying its version")
        return version.value

    def _check(self, result: int, what: str) -> None:
        if result not in (_SUCCESS, _IN_PROGRESS):
            raise TransportError(f"NCCL failed in {what}: {self._text(result)}")

    def _text(self, result: int) -> str:
        last: bytes = self._nccl.ncclGetLastError(None) or b""
        error: bytes = self._nccl.ncclGetErrorString(result)
        return f"{error.decode()} {last.decode(errors='replace').strip()}".strip()


@cache
def _library() -> ctypes.CDLL:
    """Return the NCCL library that PyTorch has loaded."""
    try:
        nccl = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise TransportError(f"device 'cuda' with several nodes needs NCCL, which was not found: {error}") from error
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name in ("ncclSend", "ncclRecv"):
        getattr(nccl, name).argtypes = [pointer, size, integer, integer, pointer, pointer]
    nccl.ncclGetVersion.argtypes = [pointer]
    nccl.ncclCommInitRank.argtypes = [pointer, integer, _UniqueId, integer]
    nccl.ncclCommInitRankConfig.argtypes = [pointer, integer, _UniqueId, integer, pointer]
    nccl.ncclCommGetAsyncError.argtypes = [pointer, pointer]
    nccl.ncclCommAbort.argtypes = [pointer]
    nccl.ncclCommDestroy.argtypes = [pointer]
    nccl.ncclGetLastError.argtypes = [pointer]
    nccl.ncclGetLastError.restype = ctypes.c_char_p
    nccl.ncclGetErrorString.argtypes = [integer]
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    return nccl
