"""The functions of the CUDA driver that copies need."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Any

from fusco.core.errors import LaunchError
from fusco.cuda.kernels.compiler import Compiler

NOT_READY = 600
COPY_CHUNK = {"NUM_THREADS": 512}  # constants of the kernel; mover.c launches as many
_PEER_ACCESS_ALREADY_ENABLED = 704
_int, _unsigned, _size = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
_pointer, _address = ctypes.c_void_p, ctypes.c_uint64
#: What ``mover.c`` calls: the field of its ``Driver``, the driver's name, and the types of the arguments.
CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "set_context": ("cuCtxSetCurrent", (_pointer,)),
    "to_host": ("cuMemcpyDtoHAsync_v2", (_pointer, _address, _size, _pointer)),
    "from_host": ("cuMemcpyHtoDAsync_v2", (_address, _pointer, _size, _pointer)),
    "between": ("cuMemcpyDtoDAsync_v2", (_address, _address, _size, _pointer)),
    "record": ("cuEventRecord", (_pointer, _pointer)),
    "query": ("cuEventQuery", (_pointer,)),
    "wait": ("cuStreamWaitEvent", (_pointer, _pointer, _unsigned)),
    "launch": ("cuLaunchKernel", (_pointer, *[_unsigned] * 7, _pointer, _pointer, _pointer)),
}
TYPES = {name: ctypes.CFUNCTYPE(_int, *arguments) for name, (_, arguments) in CALLS.items()}
TYPES["now"] = ctypes.CFUNCTYPE(ctypes.c_int64)


class DriverTable(ctypes.Structure):
    """The struct ``Driver`` of ``mover.c``."""

    _fields_ = tuple(TYPES.items())


class CudaDriver:
    """The CUDA driver; every method raises ``LaunchError`` with the driver's name of an error."""

    def __init__(self) -> None:
        """Load the driver; raises ``OSError`` where there is none."""
        self._library = ctypes.CDLL("libcuda.so.1")  # the table's addresses, and an error that says what is missing
        from cuda.bindings import driver  # noqa: PLC0415  only where links are shared

        self._driver = driver
        self._call("cuInit", 0)

    def table(self) -> DriverTable:
        """Return the addresses of what ``mover.c`` calls; its clock is the system's."""
        found = {field: getattr(self._library, name) for field, (name, _) in CALLS.items()}
        return DriverTable(**{field: TYPES[field](_address_of(function)) for field, function in found.items()})

    def retain(self, device: int) -> int:
        """Return the primary context of a device, which PyTorch uses as well; makes it if nothing has."""
        return int(self._call("cuDevicePrimaryCtxRetain", device))

    def release(self, device: int) -> None:
        self._call("cuDevicePrimaryCtxRelease", device)

    @contextlib.contextmanager
    def current(self, context: int) -> Iterator[None]:
        """Make a context current in this thread for a while."""
        if int(self._call("cuCtxGetCurrent")) == context:  # as a rule: PyTorch has made it current
            yield
            return
        self._call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def can_access(self, device: int, peer: int) -> bool:
        """Return whether a device can access another's memory."""
        return bool(self._call("cuDeviceCanAccessPeer", device, peer))

    def enable_access(self, peer_context: int) -> None:
        """Let the current context access the memory of another."""
        self._call("cuCtxEnablePeerAccess", peer_context, 0, good=_PEER_ACCESS_ALREADY_ENABLED)

    def new_stream(self) -> int:
        """Return a stream of the current context that does not wait for the default stream."""
        return int(self._call("cuStreamCreate", self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def free_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream)

    def new_event(self) -> int:
        """Return an event of the current context."""
        return int(self._call("cuEventCreate", self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def free_event(self, event: int) -> None:
        self._call("cuEventDestroy", event)

    def allocate(self, num_bytes: int) -> int:
        """Return the address of new memory of the current context's device."""
        return int(self._call("cuMemAlloc", num_bytes))

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def load_copy_kernel(self) -> tuple[int, int]:
        """Return the kernel that copies chunks, as a module and its function, loaded into the current context."""
        device = self._call("cuCtxGetDevice")
        of = self._driver.CUdevice_attribute
        numbers = of.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, of.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
        major, minor = (self._call("cuDeviceGetAttribute", number, device) for number in numbers)
        module = self._call("cuModuleLoadData", Compiler(f"sm_{major}{minor}").compile("copy_chunk", COPY_CHUNK))
        return int(module), int(self._call("cuModuleGetFunction", module, b"copy_chunk"))

    def free_module(self, module: int) -> None:
        self._call("cuModuleUnload", module)

    def bus_id(self, device: int) -> str:
        """Return the PCI bus id of a device, for example ``"0000:0f:00.0"``."""
        text: bytes = self._call("cuDeviceGetPCIBusId", 32, device)
        return text.rstrip(b"\0").decode()

    def num_devices(self) -> int:
        """Return the number of devices that this process sees."""
        return int(self._call("cuDeviceGetCount"))

    def copy(self, direction: int, device: int, host: int, num_bytes: int, stream: int) -> None:
        """Copy to (0) or from (1) pinned host memory on a stream: what ``cudaMemcpyAsync`` does."""
        if direction:
            self._call("cuMemcpyHtoDAsync", device, host, num_bytes, stream)
        else:
            self._call("cuMemcpyDtoHAsync", host, device, num_bytes, stream)

    def record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Have a stream wait for an event."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def is_complete(self, event: int) -> bool:
        """Return whether all work before an event is done."""
        (code,) = self._driver.cuEventQuery(event)
        if int(code) not in (0, NOT_READY):
            raise LaunchError(f"cuEventQuery failed: {self.error_name(int(code))}")
        return int(code) == 0

    def error_name(self, code: int) -> str:
        """Return the driver's name of an error, for example ``"CUDA_ERROR_ILLEGAL_ADDRESS"``."""
        name = self._driver.cuGetErrorName(self._driver.CUresult(code))[1]
        return (name or b"unknown error").decode() + f" ({code})"

    def _call(self, name: str, *arguments: Any, good: int = 0) -> Any:
        """Call a function of the driver; return its results without the code."""
        code, *made = getattr(self._driver, name)(*arguments)
        if int(code) not in (0, good):
            raise LaunchError(f"{name} failed: {self.error_name(int(code))}")
        return made[0] if made else None


@cache
def cuda_driver() -> CudaDriver:
    """Return the CUDA driver of this process; raises ``OSError`` where there is none."""
    return CudaDriver()


def _address_of(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)
