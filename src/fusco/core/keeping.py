"""Keep objects alive until the process exits."""

from __future__ import annotations

import ctypes
from typing import Any


def leak(thing: Any) -> None:
    """Keep an object, and everything that it references, alive until the process ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
