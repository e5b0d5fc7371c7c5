"""NCCL's point-to-point messages between device memories, on streams of ours and with limits of ours.

Not through PyTorch's process group: that one makes connections without a limit, runs on streams of its own, and ends
the process if a peer fails. Here every call returns at once (NCCL's non-blocking mode), and ``abort`` ends what is
under way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock

from fusco.errors import Stall, TransportError
from fusco.transport.roll_call import RollCall

_SUCCESS, _IN_PROGRESS = 0, 7
_INT8 = 0
_UNIQUE_ID_BYTES = 128
_MAGIC = 0xCAFEBEEF
_UNDEFINED = -(2**31)
# The version whose ``ncclConfig_t`` is below; later ones take it as it is.
_CONFIG_VERSION = 21800


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * _UNIQUE_ID_BYTES)]


class _Config(ctypes.Structure):
    """``ncclConfig_t`` of NCCL 2.18."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    ]


@dataclass(frozen=True)
class Message:
    """Some device memory that goes to a rank, or comes from it."""

    peer: int
    address: int
    num_bytes: int


class NcclTransport:
    """One rank's end of a communicator of NCCL's among all ranks. ``abort`` may be called from another thread."""

    def __init__(self, roll: RollCall, wait_until: Callable[[Callable[[], bool], Callable[[], Stall]], None]) -> None:
        """Connect, together with all ranks, on the current device.

        Raises ``TransportError`` if NCCL fails; whatever ``wait_until`` raises if a rank does not come.
        """
        self._nccl, self._wait_until = _library(), wait_until
        self._comm, self._lock, self._is_open = ctypes.c_void_p(), Lock(), True
        self._others = tuple(rank for rank in range(roll.world_size) if rank != roll.rank)
        unique_id = _UniqueId()
        if roll.rank == 0:
            self._check(self._nccl.ncclGetUniqueId(ctypes.byref(unique_id)), "making an id")
        ctypes.memmove(
            ctypes.byref(unique_id), bytes.fromhex(roll.gather("nccl", bytes(unique_id).hex())[0]), _UNIQUE_ID_BYTES
        )
        config = _Config(
            size=ctypes.sizeof(_Config),
            magic=_MAGIC,
            version=_CONFIG_VERSION,
            blocking=0,
            cga_cluster_size=_UNDEFINED,
            min_ctas=_UNDEFINED,
            max_ctas=_UNDEFINED,
            net_name=None,
            split_share=_UNDEFINED,
        )
        result = self._nccl.ncclCommInitRankConfig(
            ctypes.byref(self._comm), roll.world_size, unique_id, roll.rank, ctypes.byref(config)
        )
        self._settle(result, "connecting")

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], stream: int) -> None:
        """Launch messages that travel side by side, on a stream. Every rank's sends and receives must match."""
        if not (sends or receives):
            return
        with self._lock:
            result = self._launch(sends, receives, stream) if self._is_open else _IN_PROGRESS
        self._settle(result, "launching messages")

    def _launch(self, sends: Sequence[Message], receives: Sequence[Message], stream: int) -> int:
        self._check(self._nccl.ncclGroupStart(), "beginning a group")
        for messages, call in ((sends, self._nccl.ncclSend), (receives, self._nccl.ncclRecv)):
            for message in messages:
                result = call(message.address, message.num_bytes, _INT8, message.peer, self._comm, stream)
                self._check(result, f"a message of {message.num_bytes} bytes with rank {message.peer}")
        end: int = self._nccl.ncclGroupEnd()
        return end

    @property
    def failure(self) -> str:
        """What went wrong on the network, or ``""``."""
        with self._lock:
            if not self._is_open:
                return ""
            state = self._state()
        return "" if state in (_SUCCESS, _IN_PROGRESS) else f"NCCL: {self._text(state)}"

    def abort(self) -> None:
        """End everything under way, which leaves garbage, and give everything back; a second call does nothing."""
        with self._lock:
            if self._is_open and self._comm:
                self._is_open = False
                self._nccl.ncclCommAbort(self._comm)

    def _settle(self, result: int, what: str) -> None:
        """Wait until NCCL has done on the host what it was asked for."""
        self._check(result, what)
        stall = Stall(f"NCCL {what}", self._others, "an end of it", "none yet")
        seen = _IN_PROGRESS

        def is_settled() -> bool:
            nonlocal seen
            with self._lock:
                # Once it is called off, whoever did so has words for it, which the wait finds.
                seen = self._state() if self._is_open else _IN_PROGRESS
            return seen != _IN_PROGRESS

        self._wait_until(is_settled, lambda: stall)
        self._check(seen, what)

    def _state(self) -> int:
        state = ctypes.c_int()
        result: int = self._nccl.ncclCommGetAsyncError(self._comm, ctypes.byref(state))
        return result or state.value

    def _check(self, result: int, what: str) -> None:
        if result not in (_SUCCESS, _IN_PROGRESS):
            raise TransportError(f"NCCL failed in {what}: {self._text(result)}")

    def _text(self, result: int) -> str:
        last: bytes = self._nccl.ncclGetLastError(self._comm) or b""
        words: bytes = self._nccl.ncclGetErrorString(result)
        return f"{words.decode()} {last.decode(errors='replace').strip()}".strip()


@cache
def _library() -> ctypes.CDLL:
    """The NCCL that PyTorch has loaded."""
    try:
        nccl = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise TransportError(f"device 'cuda' with several nodes needs NCCL, which was not found: {error}") from error
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name in ("ncclSend", "ncclRecv"):
        getattr(nccl, name).argtypes = [pointer, size, integer, integer, pointer, pointer]
    nccl.ncclCommInitRankConfig.argtypes = [pointer, integer, _UniqueId, integer, pointer]
    nccl.ncclCommGetAsyncError.argtypes = [pointer, pointer]
    nccl.ncclCommAbort.argtypes = [pointer]
    nccl.ncclGetLastError.argtypes = [pointer]
    nccl.ncclGetLastError.restype = ctypes.c_char_p
    nccl.ncclGetErrorString.argtypes = [integer]
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    return nccl
