"""Functions and kernels of Python, called by their addresses as those of the driver and of NCCL are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from fusco.control.machine_calls import NUM_ARGUMENTS, address_of
from fusco.cuda.kernels.library import BoundLaunch


class Native:
    """A function that compiled code calls with up to six integers.

    Attributes:
        address: of the function.
        error: what it has raised; then it returns 1.
    """

    def __init__(self, function: Callable[..., object], num_arguments: int = NUM_ARGUMENTS) -> None:
        self.error: BaseException | None = None

        def call(*arguments: int) -> int:
            try:
                function(*arguments[:num_arguments])
            except BaseException as error:  # noqa: BLE001  raised by ``fail``: a callback would lose it
                self.error = error
                return 1
            return 0

        self.function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * NUM_ARGUMENTS)(call)
        self.address = address_of(self.function)

    def fail(self, _result: int) -> None:
        raise self.error or AssertionError("it has not failed")


class BoundByAddress:
    """Base of stand-ins for ``Kernel``, which have its ``launch``: programs call that by an address."""

    def bind(self, arguments: ctypes.Structure, stream: int, **shape: Any) -> BoundLaunch:
        return _Bound(self, arguments, Native(lambda: self.launch(arguments, stream, **shape), 0))  # type: ignore[attr-defined]


class _Bound(BoundLaunch):
    def __init__(self, kernel: Any, arguments: ctypes.Structure, native: Native) -> None:
        self._kernel, self._arguments, self._native = kernel, arguments, native
        self.driver_launch, self.call, self.fail = native.address, (0, 0, 0), native.fail
