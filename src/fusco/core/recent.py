"""Dictionary of bounded size, for what is worth keeping from call to call."""

from __future__ import annotations

from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Recent(dict[_Key, _Value]):
    """Dictionary that forgets its oldest entry when it would exceed ``max_size``. Lookups cost what a dict's do.

    >>> recent = Recent(max_size=2)
    >>> for number in range(3):
    ...     recent[number] = "kept"
    >>> recent
    {1: 'kept', 2: 'kept'}
    """

    def __init__(self, max_size: int = 1024) -> None:
        super().__init__()
        self._max_size = max_size

    def __setitem__(self, key: _Key, value: _Value) -> None:
        if len(self) >= self._max_size and key not in self:
            del self[next(iter(self))]
        super().__setitem__(key, value)
