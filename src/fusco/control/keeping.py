"""Objects whose end would do harm."""

from __future__ import annotations

import ctypes
from typing import Any


def leak(thing: Any) -> None:
    """Never give an object's memory back, nor anything that it holds."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
