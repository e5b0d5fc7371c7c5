"""Structs of the driver that are written without its bindings have the bindings' layout, byte for byte."""

from __future__ import annotations

import ctypes

import pytest

from fusco.cuda.kernels.library import _SERIALIZATION, _Attribute, _Config

driver = pytest.importorskip("cuda.bindings.driver", reason="the layout is that of cuda-bindings")


def bytes_at(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


def test_a_launch_configuration():
    theirs = driver.CUlaunchConfig()
    theirs.gridDimX, theirs.gridDimY, theirs.gridDimZ = 5, 1, 1
    theirs.blockDimX, theirs.blockDimY, theirs.blockDimZ = 512, 1, 1
    theirs.sharedMemBytes, theirs.hStream = 1234, 0x7F1234567890
    ours = _Config((5, 1, 1), (512, 1, 1), 1234, 0x7F1234567890)
    # Up to the number of attributes; what follows is padding.
    size = _Config.num_attributes.offset + 4
    assert bytes_at(theirs.getPtr(), size) == bytes(ours)[:size]


def test_an_attribute():
    theirs = driver.CUlaunchAttribute()
    theirs.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    theirs.value.programmaticStreamSerializationAllowed = 1
    ours = _Attribute(id=_SERIALIZATION, flag=1)
    assert ctypes.sizeof(_Attribute) == 72
    assert bytes_at(theirs.getPtr(), 12) == bytes(ours)[:12]
