"""Objects whose destruction would do harm."""

from __future__ import annotations

import ctypes
from typing import Any


def leak(thing: Any) -> None:
    """Keep an object, and everything that it references, alive until the process ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
