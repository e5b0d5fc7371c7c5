"""The device and capture mode of helper threads, with a mock of the driver."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fusco.core.errors import TransportError
from fusco.cuda.gpu import Gpu

driver = pytest.importorskip(
    "cuda.bindings.driver", reason="needs cuda-core, which fusco[cuda] and fusco[test] install"
)
DEVICE = torch.device("cuda", 3)


@pytest.fixture
def calls():
    made = []

    def exchange(mode):
        made.append(mode)
        return driver.CUresult.CUDA_SUCCESS, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL

    with (
        mock.patch.object(torch.cuda, "set_device", made.append),
        mock.patch.object(driver, "cuThreadExchangeStreamCaptureMode", exchange),
    ):
        yield made


def test_a_thread_uses_its_device_and_sees_only_its_own_captures(calls):
    Gpu(DEVICE).enter_thread()
    assert calls == [DEVICE, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL]


def test_a_failure_to_set_the_capture_mode_raises(calls):
    failure = driver.CUresult.CUDA_ERROR_NOT_INITIALIZED, None
    with (
        mock.patch.object(driver, "cuThreadExchangeStreamCaptureMode", return_value=failure),
        pytest.raises(TransportError, match="CUDA_ERROR_NOT_INITIALIZED"),
    ):
        Gpu(DEVICE).enter_thread()
