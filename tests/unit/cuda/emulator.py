"""The CUDA kernels themselves on the CPU: compiled by the host's C++ compiler, run in any order that they allow.

``emulation/base.cuh`` replaces the kernels' ``base.cuh``, which has everything that is not plain C++; all other sources
are the real ones. A thread runs until it reaches a barrier, sleeps, or touches a flag; a seed chooses the next one.
This finds wrong counts, wrong places, missing waits and deadlocks. It does not find wrong memory order.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import random
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from native_functions import BoundByAddress
from simulated_device import END_OF_KERNEL, Machine, driver_functions
from simulated_kernels import copy_of

from fusco.cuda.kernels.compiler import SOURCE_DIR

EMULATION_DIR = Path(__file__).parent / "emulation"
_CXX = shutil.which("g++") or shutil.which("clang++")
_FLAGS = ("-std=c++17", "-w", "-shared", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off")
_SCHEDULER_FLAGS = (*_FLAGS, "-O2")
# Compiling a kernel takes longer than running it: without optimization and what only the scheduler needs, 0.6 of that.
_KERNEL_FLAGS = (*_FLAGS, "-O0", "-nostdlib", "-fno-exceptions", "-fno-rtti", "-fno-asynchronous-unwind-tables")
# Blocks of two warps, whatever they are on a GPU: contexts are not threads.
NUM_THREADS = 64

is_available = _CXX is not None


class Emulator:
    """An actor of a simulated machine: the processors of all devices. One at a time in a process."""

    def __init__(self, folder: Path, seed: int, patience: int = 1) -> None:
        """Keep what is compiled in ``folder``; lets a millisecond pass ``patience`` times while all threads wait."""
        self._folder, self._patience = folder, patience
        self._simt = _load_scheduler(folder)
        self._simt.simt_reset(seed)
        self._random = random.Random(seed)
        self.favour = self._random.choice((1, 8, 64))
        self._num_launched = self._num_idle = 0

    def launch(
        self,
        name: str,
        constants: Mapping[str, object],
        arguments: ctypes.Structure,
        stream: int,
        *,
        grid: int,
        shared_bytes: int,
        is_dependent: bool,
        max_resident: int,
    ) -> int:
        """Put a kernel into a stream; returns its number. No more than ``max_resident`` of its blocks run at once."""
        kernel = _load_kernel(self._folder, name, tuple({**constants, "NUM_THREADS": NUM_THREADS}.items()))
        number: int = self._simt.simt_launch(
            kernel.simt_entry,
            ctypes.byref(arguments),
            ctypes.sizeof(arguments),
            stream,
            grid,
            NUM_THREADS,
            shared_bytes,
            is_dependent,
            max_resident,
        )
        self._num_launched += 1
        return number

    def is_done(self, number: int) -> bool:
        """Whether a kernel is."""
        return bool(self._simt.simt_is_done(number))

    def is_ready(self) -> bool:
        """Whether threads may have something to do; they may not if others have done nothing since they last looked."""
        return bool(self._simt.simt_num_done() < self._num_launched) and self._num_idle < self._patience

    def go_on(self) -> None:
        """Run threads for a while."""
        has_gone_on = self._simt.simt_go_on(self._random.choice((1, 20, 1000)))
        if failure := self._simt.simt_failure():
            raise AssertionError(failure.decode())
        self._num_idle = 0 if has_gone_on else self._num_idle + 1

    def look_again(self) -> None:
        """Another actor has made progress."""
        self._num_idle = 0


class EmulatorOfThreads:
    """Emulator for hosts that are threads: who waits for a kernel runs those of all."""

    def __init__(self, folder: Path) -> None:
        self._emulator, self._lock, self._streams = Emulator(folder, seed=0), threading.Lock(), count(1)

    def kernel(self, name: str, constants: Mapping[str, object], limit_s: float) -> SimpleNamespace:
        """Kernel whose launch returns when it is done."""
        return SimpleNamespace(name=name, launch=partial(self._run, name, constants, limit_s))

    def _run(
        self,
        name: str,
        constants: Mapping[str, object],
        limit_s: float,
        arguments: ctypes.Structure,
        _stream: int,
        *,
        grid: int,
        shared_bytes: int,
        **_: object,
    ) -> None:
        shape = {"grid": grid, "shared_bytes": shared_bytes, "is_dependent": False, "max_resident": grid}
        with self._lock:
            number = self._emulator.launch(name, constants, copy_of(arguments), next(self._streams), **shape)
        give_up = time.monotonic() + limit_s
        while True:
            with self._lock:
                if self._emulator.is_done(number):
                    return
                self._emulator.go_on()
                if not (is_ready := self._emulator.is_ready()):
                    self._emulator.look_again()
            if not is_ready:
                assert time.monotonic() < give_up, f"{name} waits for another rank"
                time.sleep(1e-3)  # as much as passes for kernels


_schedulers: list[ctypes.CDLL] = []  # at most one: kernels find it by its global names


def _load_scheduler(folder: Path) -> ctypes.CDLL:
    if not _schedulers:
        _schedulers.append(_build_scheduler(folder))
    return _schedulers[0]


def _build_scheduler(folder: Path) -> ctypes.CDLL:
    library = _build(folder, "simt", (EMULATION_DIR / "simt.cpp").read_text(), _SCHEDULER_FLAGS)
    simt = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    simt.simt_launch.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_ulonglong,
        ctypes.c_uint,
        ctypes.c_uint,
        ctypes.c_size_t,
        ctypes.c_bool,
        ctypes.c_uint,
    ]
    simt.simt_is_done.restype = simt.simt_go_on.restype = ctypes.c_bool
    simt.simt_failure.restype = ctypes.c_char_p
    return simt


@cache
def _load_kernel(folder: Path, name: str, constants: tuple[tuple[str, object], ...]) -> ctypes.CDLL:
    source = as_host_code((SOURCE_DIR / f"{name}.cu").read_text())
    arguments = re.search(r"__grid_constant__ (\w+) args", source)
    assert arguments, f"{name} takes one struct"
    entry = f'extern "C" void simt_entry(const void* at) {{ {name}(*static_cast<const {arguments[1]}*>(at)); }}\n'
    flags = [*_KERNEL_FLAGS, *(f"-D{key}={value}" for key, value in constants)]
    return ctypes.CDLL(str(_build(folder, name, source + entry, flags)))


def as_host_code(source: str) -> str:
    """Replace declarations that no macro can: shared memory, which belongs to a block."""
    dynamic = r"extern __shared__ (?:__align__\(\d+\) )?(\w+) shared\[\];"
    source = re.sub(dynamic, r"\1* const shared = static_cast<\1*>(simt::dynamic_shared());", source)
    source = re.sub(r"__shared__ (\w+) (\w+)\[(.+?)\];", r"auto& \2 = simt::shared<\1[\3], __COUNTER__>();", source)
    source = re.sub(r"__shared__ (\w+) (\w+);", r"auto& \2 = simt::shared<\1, __COUNTER__>();", source)
    assert "__shared__" not in source
    return source


def _build(folder: Path, name: str, source: str, flags: Sequence[str]) -> Path:
    headers = folder / "headers"
    if not headers.exists():
        folder.mkdir(parents=True, exist_ok=True)
        written = Path(tempfile.mkdtemp(dir=folder))
        for header in (*SOURCE_DIR.glob("*.cuh"), EMULATION_DIR / "base.cuh", EMULATION_DIR / "simt.hpp"):
            (written / header.name).write_text(as_host_code(header.read_text()))
        with contextlib.suppress(OSError):  # another process has been quicker
            written.rename(headers)
    key = hashlib.sha256("\n".join([source, *flags]).encode()).hexdigest()[:16]
    library = folder / f"{name}-{key}.so"
    if not library.exists():
        code = folder / f"{name}-{key}-{os.getpid()}.cpp"
        code.write_text(source)
        built_library = code.with_suffix(".so")
        command = [str(_CXX), *flags, f"-I{headers}", str(code), "-o", str(built_library)]
        built = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert built.returncode == 0, built.stderr
        built_library.replace(library)  # complete, whatever other processes do
    return library


class EmulatedLibrary:
    """Replaces ``Library`` on a simulated machine."""

    def __init__(self, machine: Machine, emulator: Emulator, num_sms: int, max_resident: int | None = None) -> None:
        self.device, self.num_sms, self.max_shared_bytes = torch.device("cpu"), num_sms, 227 << 10
        self._machine, self._emulator, self._max_resident = machine, emulator, max_resident or num_sms
        self._functions = driver_functions(machine)

    def address_of(self, function: str) -> int:
        return self._functions[function].address

    def get(self, name: str, constants: Mapping[str, Any]) -> EmulatedKernel:
        return EmulatedKernel(self._machine, self._emulator, name, constants, self._max_resident)


class EmulatedKernel(BoundByAddress):
    """Replaces ``Kernel``. Of a grid, no more than ``max_resident`` blocks are there at once."""

    def __init__(
        self, machine: Machine, emulator: Emulator, name: str, constants: Mapping[str, Any], max_resident: int
    ) -> None:
        self._machine, self._emulator, self._name, self._constants = machine, emulator, name, constants
        self._max_resident = max_resident

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
        assert grid >= 1
        arguments = copy_of(arguments)
        numbers: list[int] = []

        def begin() -> None:
            number = self._emulator.launch(
                self._name,
                self._constants,
                arguments,
                stream,
                grid=grid,
                shared_bytes=shared_bytes,
                is_dependent=is_dependent,
                max_resident=self._max_resident,
            )
            numbers.append(number)

        queue = self._machine.stream_of(stream)
        launch = queue.launch_early if is_dependent else queue.launch
        launch(f"the beginning of {self._name}", begin)
        queue.launch(END_OF_KERNEL + self._name, lambda: None, lambda: self._emulator.is_done(numbers[0]))
