"""Properties that NCCL's plugins have, and version 10 of their interface, which NCCL before 2.28 calls."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_uint64, c_void_p

from fusco.bench.rails.plugin import LOGGER, Plugin, Table


class VirtualNic(ctypes.Structure):
    """``ncclNetVDeviceProps``."""

    _fields_ = (("ndevs", c_int), ("devs", c_int * 4))


class PropertiesV10(ctypes.Structure):
    """``ncclNetProperties_v10_t``."""

    _fields_ = (
        ("name", c_char_p), ("pciPath", c_char_p), ("guid", c_uint64), ("ptrSupport", c_int), ("regIsGlobal", c_int),
        ("forceFlush", c_int), ("speed", c_int), ("port", c_int), ("latency", c_float), ("maxComms", c_int),
        ("maxRecvs", c_int), ("netDeviceType", c_int), ("netDeviceVersion", c_int), ("vProps", VirtualNic),
        ("maxP2pBytes", c_size_t), ("maxCollBytes", c_size_t),
    )  # fmt: skip


class PropertiesV11(ctypes.Structure):
    """``ncclNetProperties_v11_t``."""

    _fields_ = (*PropertiesV10._fields_, ("maxMultiRequestSize", c_int))


_P, _PP = c_void_p, POINTER(c_void_p)
_OTHERS = {
    "init": ctypes.CFUNCTYPE(c_int, LOGGER, _P),
    "listen": ctypes.CFUNCTYPE(c_int, c_int, _P, _PP),
    "connect": ctypes.CFUNCTYPE(c_int, c_int, _P, _P, _PP, _PP),
}


class TableV10(ctypes.Structure):
    """``ncclNet_v10_t``: as version 11, without contexts and the last two functions."""

    _fields_ = tuple((name, _OTHERS.get(name, kind)) for name, kind in Table._fields_[:-2])


class PluginV10(Plugin):
    def load(self, library):
        self.table = TableV10.in_dll(library, "ncclNetPlugin_v10")
        self.call(self.table.init, self.logger, None)

    def listen(self):
        handle, comm = ctypes.create_string_buffer(128), c_void_p()
        self.call(self.table.listen, 0, handle, ctypes.byref(comm))
        return handle, comm

    def connect(self, handle):
        return self.established("connect", 0, None, handle)

    def finalize(self):
        """Do nothing: this version has no such function."""
