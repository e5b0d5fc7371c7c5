"""Launcher of a communicator's kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

from fusco.core.recent import Recent
from fusco.cuda.kernels.abi import Number
from fusco.cuda.kernels.library import BoundLaunch, Kernel, Library
from fusco.cuda.tuning import MAX_PARTS

Fields: TypeAlias = Mapping[str, Number | Sequence[Number]]


class PreparedLaunch:
    """A kernel and its launch shape, with a struct of arguments of which every call sets what has changed.

    The struct may be changed again as soon as ``launch`` returns: the driver copies it.
    """

    __slots__ = ("_shape", "_tables", "arguments", "grid", "kernel", "launch")

    def __init__(self, kernel: Kernel, arguments: ctypes.Structure, shape: Mapping[str, Any]) -> None:
        self.kernel, self.arguments, self._shape = kernel, cast("Any", arguments), shape
        self.grid: int = shape["grid"]
        self.launch: Callable[[int], None] = partial(kernel.launch, arguments, **shape)  # on a stream handle
        self._tables: dict[str, Any] = {}

    def set(self, fields: Fields) -> None:
        """Set fields, which have no ``Value``."""
        for name, number in fields.items():
            if isinstance(number, int):
                setattr(self.arguments, name, number)
            else:
                self._set_table(name, cast("Any", number))

    def _set_table(self, name: str, entries: Sequence[int]) -> None:
        """Set all entries of a field that is an array, or an array of arrays, of numbers of 8 bytes."""
        table = self._tables.get(name)
        if table is None:
            offset = getattr(type(self.arguments), name).offset
            table = self._tables[name] = (ctypes.c_uint64 * len(entries)).from_buffer(self.arguments, offset)
        table[:] = entries

    def bound_to(self, stream: int) -> BoundLaunch:
        """Return the same launch on a stream handle, with a copy of the arguments as they are now."""
        return self.kernel.bind(type(self.arguments).from_buffer_copy(self.arguments), stream, **self._shape)


class KernelCall(NamedTuple):
    """A kernel and all of its arguments that change from call to call, by name; each number has 8 bytes.

    With a ``Value`` among them it is for a ``Program``.
    """

    prepared: PreparedLaunch
    fields: Fields

    @property
    def grid(self) -> int:
        """Number of blocks."""
        return self.prepared.grid

    def launch(self, stream: int) -> None:
        """Launch it on a stream handle."""
        self.prepared.set(self.fields)
        self.prepared.launch(stream)


@dataclass(frozen=True)
class Launcher:
    """Launches kernels of a device for one rank."""

    library: Library  # the device's kernels
    comm: ctypes.Structure  # a ``comm_type`` struct, the argument of kernels that work across the node's ranks
    stream: int  # the handle of the stream to launch on
    # launches by kernel, compile-time constants and launch shape; shared by the launchers of all streams
    prepared: Recent[tuple[object, ...], PreparedLaunch] = field(default_factory=Recent)

    @property
    def num_ranks(self) -> int:
        """Ranks of the node."""
        return len(self.comm.arena)

    def sms(self, num_sms: int | None) -> int:
        """Return ``num_sms``, or the device's number of SMs if that is fewer or ``num_sms`` is not given."""
        return min(num_sms or self.library.num_sms, self.library.num_sms)

    def prepare(
        self,
        key: tuple[object, ...],
        constants: Mapping[str, object],
        arguments: ctypes.Structure,
        *,
        grid: int,
        num_threads: int,
        shared_bytes: int = 0,
        is_dependent: bool = False,
    ) -> PreparedLaunch:
        """Return a launch of the kernel ``key[0]``, and keep it in ``prepared`` under the key.

        The rest of the key is everything that constants, launch shape and unchanged arguments depend on. Compile-time
        constants of all kernels are added to ``constants``. See ``PreparedLaunch`` for the arguments, and
        ``Kernel.launch`` for the launch shape.
        """
        kernel = self._find(str(key[0]), constants, arguments, num_threads)
        shape = {"grid": grid, "num_threads": num_threads, "shared_bytes": shared_bytes, "is_dependent": is_dependent}
        prepared = self.prepared[key] = PreparedLaunch(kernel, arguments, shape)
        return prepared

    def launch(
        self,
        name: str,
        constants: Mapping[str, object],
        arguments: ctypes.Structure,
        *,
        grid: int,
        num_threads: int,
        shared_bytes: int = 0,
    ) -> None:
        """Launch a kernel that is not worth preparing; see ``prepare``."""
        kernel = self._find(name, constants, arguments, num_threads)
        kernel.launch(arguments, self.stream, grid=grid, num_threads=num_threads, shared_bytes=shared_bytes)

    def _find(
        self, name: str, constants: Mapping[str, object], arguments: ctypes.Structure, num_threads: int
    ) -> Kernel:
        always: dict[str, object] = {
            "ARGUMENT_BYTES": ctypes.sizeof(arguments),
            "NUM_RANKS": self.num_ranks,
            "NUM_THREADS": num_threads,
            "MAX_PARTS": MAX_PARTS,
        }
        return self.library.get(name, always | dict(constants))
