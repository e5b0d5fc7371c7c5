"""Dictionary of bounded size, for what is worth keeping from call to call."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Recent(OrderedDict[_Key, _Value]):
    """Dictionary of at most ``max_size`` entries: the least recently used one goes.

    ``use`` and assignments are uses. ``get`` is none, and takes a third of the time.

    >>> recent = Recent(max_size=2)
    >>> recent[1] = recent[2] = "kept"
    >>> recent.use(1)
    'kept'
    >>> recent[3] = "kept"
    >>> list(recent)
    [1, 3]
    """

    def __init__(self, max_size: int = 1024) -> None:
        super().__init__()
        self._max_size = max_size

    def use(self, key: _Key) -> _Value | None:
        """Return the value of a key; ``None`` if there is none."""
        if key not in self:
            return None
        self.move_to_end(key)
        return self[key]

    def __setitem__(self, key: _Key, value: _Value) -> None:
        if key in self:
            self.move_to_end(key)
        elif len(self) >= self._max_size:
            self.popitem(last=False)
        super().__setitem__(key, value)
