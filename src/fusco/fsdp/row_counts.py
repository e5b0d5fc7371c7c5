"""Counts of the rows that arrived for a layer's experts, without those that activation checkpointing recomputes."""

from __future__ import annotations

from itertools import count
from weakref import WeakValueDictionary

import torch

from fusco.fsdp import ops

# Module state: torch's operators are global and take tensors and numbers only. The weak references keep nothing alive.
_numbers = count()
_key_to_counter: WeakValueDictionary[int, RowCounter] = WeakValueDictionary()


class RowCounter:
    """Adds up the rows of each local expert of a layer in forward passes with gradients.

    Every reader counts from its own mark, so that none disturbs another.
    """

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None  # int64 (num_local_experts,), on the device of the rows
        self._reader_to_mark: dict[str, torch.Tensor] = {}
        self._key = next(_numbers)
        _key_to_counter[self._key] = self

    def count(self, num_rows: torch.Tensor) -> torch.Tensor:
        """Count rows, int64 (num_local_experts,), and return them.

        Under a compiler or a dispatch mode this is an operator, which they cannot see into, and whose result is used.
        """
        if ops.is_intercepted():
            counted: torch.Tensor = _count(num_rows, self._key, torch.is_grad_enabled())
            return counted
        if torch.is_grad_enabled():
            self.add(num_rows)
        return num_rows

    def add(self, num_rows: torch.Tensor) -> None:
        """Count rows, unless a backward pass recomputes them."""
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001  as torch.utils.checkpoint asks
            return
        with torch.no_grad():
            if self._total is None:
                self._total = torch.zeros_like(num_rows, dtype=torch.int64)
            self._total += num_rows

    def since_mark(self, reader: str) -> torch.Tensor | None:
        """Return the rows since the reader's last mark, or the beginning; ``None`` if none were ever counted."""
        if self._total is None:
            return None
        mark = self._reader_to_mark.get(reader)
        return self._total.clone() if mark is None else self._total - mark

    def mark(self, reader: str) -> None:
        """Begin to count anew for a reader."""
        if self._total is not None:
            self._reader_to_mark[reader] = self._total.clone()


@torch.library.custom_op("fusco::count_rows", mutates_args=())
def _count(num_rows: torch.Tensor, counter: int, is_training: bool) -> torch.Tensor:  # noqa: FBT001  an operator's
    if is_training and counter in _key_to_counter:
        _key_to_counter[counter].add(num_rows)
    return num_rows.clone()


@_count.register_fake
def _fake_count(num_rows: torch.Tensor, counter: object, is_training: object) -> torch.Tensor:  # noqa: ARG001  the same
    return torch.empty_like(num_rows)
