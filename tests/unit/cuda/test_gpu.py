"""The GPU of the engine: all that asks PyTorch for it, and the device and capture mode of helper threads."""

from __future__ import annotations

import ast
from pathlib import Path
from unittest import mock

import pytest
import torch

from fusco.core.errors import TransportError
from fusco.cuda import gpu
from fusco.cuda.gpu import Gpu

DEVICE = torch.device("cuda", 3)


# Without an engine: compiling kernels, NCCL's own threads, gradients of any stream.
WITHOUT_ENGINE = {"nccl.py", "library.py", "weight_gradients.py"}


@pytest.fixture
def driver():
    return pytest.importorskip(
        "cuda.bindings.driver", reason="needs cuda-core, which fusco[cuda] and fusco[test] install"
    )


def asks_pytorch(path: Path) -> bool:
    calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return any(call.startswith("torch.cuda.") for call in calls)


def test_only_the_gpu_asks_pytorch_for_streams_events_and_memory():
    """So that tests and benchmarks replace one object, and patch nothing."""
    asking = {path.name for path in Path(gpu.__file__).parent.rglob("*.py") if asks_pytorch(path)}
    assert asking == {"gpu.py"} | WITHOUT_ENGINE


@pytest.fixture
def calls(driver):
    made = []

    def exchange(mode):
        made.append(mode)
        return driver.CUresult.CUDA_SUCCESS, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL

    with (
        mock.patch.object(torch.cuda, "set_device", made.append),
        mock.patch.object(driver, "cuThreadExchangeStreamCaptureMode", exchange),
    ):
        yield made


def test_a_thread_uses_its_device_and_sees_only_its_own_captures(calls, driver):
    Gpu(DEVICE).enter_thread()
    assert calls == [DEVICE, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL]


def test_a_failure_to_set_the_capture_mode_raises(calls, driver):
    failure = driver.CUresult.CUDA_ERROR_NOT_INITIALIZED, None
    with (
        mock.patch.object(driver, "cuThreadExchangeStreamCaptureMode", return_value=failure),
        pytest.raises(TransportError, match="CUDA_ERROR_NOT_INITIALIZED"),
    ):
        Gpu(DEVICE).enter_thread()
