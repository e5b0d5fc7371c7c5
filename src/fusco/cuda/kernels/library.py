"""Kernels, loaded on one device and launched on torch's streams."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any, NoReturn

import torch

from fusco.control.machine_calls import address_of
from fusco.core.errors import LaunchError
from fusco.core.recent import Recent
from fusco.cuda.kernels.compiler import Compiler

_FREE_SHARED_BYTES = 46 << 10  # of 48 KiB, of which a kernel's own variables take some; more needs an attribute of it

_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

_U32 = ctypes.c_uint32


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute`` of the driver, with the flag that is used here instead of its union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int32), ("pad", _U32), ("flag", ctypes.c_int32), ("rest", ctypes.c_uint8 * 60)]


class _Config(ctypes.Structure):
    """``CUlaunchConfig`` of the driver."""

    _fields_ = [
        ("grid", _U32 * 3),
        ("block", _U32 * 3),
        ("shared_bytes", _U32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", _U32),
    ]


@lru_cache(maxsize=1)
def _driver_launch() -> Any:
    """Return the driver's ``cuLaunchKernelEx``, without the conversions of ``cuda.bindings``, which take 5 us.

    It releases the interpreter's lock: a launch blocks while the device's queue is full, and other threads end waits.
    """
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    launch.argtypes, launch.restype = [ctypes.c_void_p] * 4, ctypes.c_int
    return launch


class Kernel:
    """A kernel that takes one struct by value."""

    def __init__(self, name: str, cubin: bytes) -> None:
        from cuda.bindings import driver  # noqa: PLC0415  of the extra fusco[cuda]
        from cuda.core import ObjectCode  # noqa: PLC0415

        self._driver = driver
        try:
            self._code = ObjectCode.from_cubin(cubin)
            function = int(self._code.get_kernel(name).handle)
        except Exception as error:  # cuda.core's errors have no common base that is public
            raise _error(name, "loaded", str(error)) from error
        self._set_up(name, function, _driver_launch())

    def _set_up(self, name: str, function: int, launch: Any) -> None:
        self.name, self.function, self.driver_launch = name, function, launch
        self._shared_bytes = _FREE_SHARED_BYTES
        self._configs: Recent[tuple[int, ...], Any] = Recent()
        self._parameters = (ctypes.c_void_p * 1)()

    def launch(
        self,
        arguments: ctypes.Structure,
        stream: int,
        *,
        grid: int,
        num_threads: int,
        shared_bytes: int = 0,
        is_dependent: bool = False,
    ) -> None:
        """Launch on a stream handle; with ``is_dependent``, a programmatic dependent launch that may begin early."""
        key = (stream, grid, num_threads, shared_bytes, is_dependent)
        config = self._configs.use(key) or self._configure(*key)
        self._parameters[0] = ctypes.addressof(arguments)
        if result := self.driver_launch(config, self.function, self._parameters, None):
            raise self.error(result)

    def bind(self, arguments: ctypes.Structure, stream: int, **shape: Any) -> BoundLaunch:
        """Return a launch of these arguments on a stream handle; ``shape`` has all other arguments of ``launch``."""
        return BoundLaunch(self, arguments, self._configure(stream, **shape))

    def error(self, result: int) -> LaunchError:
        """Return the error of a launch with this result."""
        return _error(self.name, "launched", self._driver.CUresult(result).name)

    def _configure(self, stream: int, grid: int, num_threads: int, shared_bytes: int, is_dependent: bool) -> Any:  # noqa: FBT001
        if shared_bytes > self._shared_bytes:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            kernel, device = self._driver.CUkernel(self.function), self._check(self._driver.cuCtxGetDevice())
            self._check(self._driver.cuKernelSetAttribute(attribute, shared_bytes, kernel, device))
            self._shared_bytes = shared_bytes
        config = _Config((grid, 1, 1), (num_threads, 1, 1), shared_bytes, stream)
        if is_dependent:
            config.attributes = ctypes.pointer(_Attribute(id=_SERIALIZATION, flag=1))
            config.num_attributes = 1
        by_reference = self._configs[stream, grid, num_threads, shared_bytes, is_dependent] = ctypes.byref(config)
        return by_reference

    def _check(self, result: tuple[Any, ...]) -> Any:
        if int(result[0]):
            raise _error(self.name, "launched", result[0].name)
        return result[-1]


class BoundLaunch:
    """A launch with all that the driver takes.

    Attributes:
        driver_launch: the address of the driver's function.
        call: its first three arguments: addresses of the configuration, the kernel, and the parameters.
    """

    def __init__(self, kernel: Kernel, arguments: ctypes.Structure, config: Any) -> None:
        self._kernel, self._arguments, self._config = kernel, arguments, config
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        self.driver_launch = address_of(kernel.driver_launch)
        self.call = (address_of(config), kernel.function, ctypes.addressof(self._parameters))

    def address_of(self, field: str, index: int) -> int:
        """Return the address of a field of 8 bytes of the arguments, or of an entry of a field that is an array."""
        at = getattr(type(self._arguments), field)
        assert at.size >= 8 * (index + 1), (field, index, at.size)
        return int(ctypes.addressof(self._arguments) + at.offset + 8 * index)

    def fail(self, result: int) -> NoReturn:
        """Raise the error of a launch with this result."""
        raise self._kernel.error(result)


def _error(name: str, done: str, why: str) -> LaunchError:
    return LaunchError(
        f"kernel {name} could not be {done}: {why}. An earlier asynchronous error on this device, of any library's "
        f"kernel, may be the cause (CUDA_LAUNCH_BLOCKING=1 shows it at its own launch)"
    )


class Library:
    """The kernels of one device, each loaded when first used."""

    def __init__(self, device: torch.device) -> None:
        properties: Any = torch.cuda.get_device_properties(device)  # PyTorch's stubs lack some
        self.device = device
        self.num_sms: int = properties.multi_processor_count
        self.max_shared_bytes: int = properties.shared_memory_per_block_optin
        self._compiler = Compiler(f"sm_{properties.major}{properties.minor}")
        self._kernels: dict[tuple[object, ...], Kernel] = {}

    def address_of(self, function: str) -> int:
        """Return the address of a function of the driver."""
        return address_of(getattr(ctypes.CDLL("libcuda.so.1"), function))

    def get(self, name: str, constants: Mapping[str, object]) -> Kernel:
        """Return the kernel of this name and these compile-time constants."""
        key = (name, *constants.items())
        if key not in self._kernels:
            self._kernels[key] = Kernel(name, self._compiler.compile(name, constants))
        return self._kernels[key]


@cache
def library_of(device: torch.device) -> Library:
    """Return the device's library, loaded until the process ends: backward passes may outlive their communicator."""
    return Library(device)
