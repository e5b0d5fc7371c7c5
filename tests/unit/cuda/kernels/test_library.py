"""What the driver says when a kernel is loaded or launched reaches the caller, with a hint at whose it may be."""

from __future__ import annotations

from unittest import mock

import pytest

from fusco.core.errors import CompileError, LaunchError
from fusco.cuda.kernels import library
from fusco.cuda.kernels.copy_segments import CopyArgs
from fusco.cuda.kernels.library import Kernel

core = pytest.importorskip("cuda.core", reason="launching kernels needs cuda-core")
driver = pytest.importorskip("cuda.bindings.driver")

ILLEGAL = (driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
HINT = r"An earlier asynchronous error on this device, of any library's kernel, may be the cause"


def loaded() -> Kernel:
    """A kernel of a driver that takes anything."""
    with mock.patch.object(core, "ObjectCode") as code, mock.patch.object(library, "_driver_launch"):
        code.from_cubin.return_value.get_kernel.return_value.handle = 0
        return Kernel("plan", b"")


def launch(kernel: Kernel, shared_bytes: int = 0) -> None:
    kernel.launch(CopyArgs(), 0, grid=1, num_threads=32, shared_bytes=shared_bytes)


def test_a_launch_that_fails_hints_at_kernels_before_it():
    kernel = loaded()
    with (
        mock.patch.object(kernel, "driver_launch", return_value=int(ILLEGAL[0])),
        pytest.raises(
            LaunchError, match=rf"kernel plan could not be launched: CUDA_ERROR_ILLEGAL_ADDRESS\. {HINT}"
        ) as raised,
    ):
        launch(kernel)
    assert not isinstance(raised.value, CompileError)


def test_so_does_asking_for_shared_memory():
    kernel = loaded()
    with (
        mock.patch.object(kernel._driver, "cuCtxGetDevice", return_value=(driver.CUresult.CUDA_SUCCESS, 0)),
        mock.patch.object(kernel._driver, "cuKernelSetAttribute", return_value=ILLEGAL),
        mock.patch.object(kernel, "driver_launch", return_value=0) as launched,
        pytest.raises(LaunchError, match=HINT),
    ):
        launch(kernel, shared_bytes=60 << 10)
    launched.assert_not_called()


def test_so_does_loading():
    code = mock.Mock()
    code.from_cubin.return_value.get_kernel.side_effect = RuntimeError("illegal memory access")
    with (
        mock.patch.object(core, "ObjectCode", code),
        pytest.raises(LaunchError, match=rf"kernel plan could not be loaded: illegal memory access\. {HINT}"),
    ):
        Kernel("plan", b"")
