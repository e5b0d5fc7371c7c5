"""Kernels, loaded on one device and launched on torch's streams."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from fusco.core.errors import LaunchError
from fusco.cuda.kernels.compiler import Compiler

_FREE_SHARED_BYTES = 48 << 10  # more than this needs an attribute of the function


class Kernel:
    """A kernel that takes one struct by value."""

    def __init__(self, name: str, cubin: bytes) -> None:
        from cuda.bindings import driver  # noqa: PLC0415  of the extra fusco[cuda]
        from cuda.core import ObjectCode  # noqa: PLC0415

        self._driver, self.name = driver, name
        try:
            self._code = ObjectCode.from_cubin(cubin)
            self._function = driver.CUfunction(int(self._code.get_kernel(name).handle))
        except Exception as error:  # cuda.core's errors have no common base that is public
            raise self._error("loaded", str(error)) from error
        self._shared_bytes = _FREE_SHARED_BYTES
        self._serialization = driver.CUlaunchAttribute()
        self._serialization.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        self._serialization.value.programmaticStreamSerializationAllowed = 1

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
        if shared_bytes > self._shared_bytes:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._check(self._driver.cuFuncSetAttribute(self._function, attribute, shared_bytes))
            self._shared_bytes = shared_bytes
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = num_threads, 1, 1
        config.sharedMemBytes, config.hStream = shared_bytes, stream
        if is_dependent:
            config.attrs, config.numAttrs = [self._serialization], 1
        self._check(self._driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0))

    def _check(self, result: tuple[Any, ...]) -> None:
        if int(result[0]):
            raise self._error("launched", result[0].name)

    def _error(self, done: str, why: str) -> LaunchError:
        return LaunchError(
            f"kernel {self.name} could not be {done}: {why}. An earlier asynchronous error on this device, of "
            f"any library's kernel, may be the cause (CUDA_LAUNCH_BLOCKING=1 shows it at its own launch)"
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
