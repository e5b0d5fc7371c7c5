"""The device and capture mode of helper threads, with a mock of the driver."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fusco.core.errors import TransportError
from fusco.cuda.network import enter_device

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
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "set_device", made.append),
        mock.patch.object(driver, "cuThreadExchangeStreamCaptureMode", exchange),
    ):
        yield made


def test_a_thread_uses_its_device_and_sees_only_its_own_captures(calls):
    enter_device(DEVICE)
    assert calls == [DEVICE, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL]


def test_a_failure_to_set_the_capture_mode_raises(calls):
    failure = driver.CUresult.CUDA_ERROR_NOT_INITIALIZED, None
    with (
        mock.patch.object(driver, "cuThreadExchangeStreamCaptureMode", return_value=failure),
        pytest.raises(TransportError, match="CUDA_ERROR_NOT_INITIALIZED"),
    ):
        enter_device(DEVICE)


def test_without_cuda_the_driver_is_not_called(calls):
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        enter_device(DEVICE)
    assert calls == []
