"""Validation of what ``all_to_all`` alone takes: its output, and the numbers of rows from and to each rank."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from fusco.core.rows import describe_rows, wants_grad

_MAX_ROWS = 2**63 - 1  # PyTorch counts in int64


def rows_of_ranks(name: str, world_size: int, num_rows: int | None, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """Return the rows of each rank, as ``sizes`` say; ``None`` means an equal number of ``num_rows`` each.

    ``name`` is ``"input"`` or ``"output"``. Without ``num_rows`` any total of the sizes will do. Raises ``TypeError``
    or ``ValueError`` for sizes that do not fit, with values.
    """
    if sizes is None:
        assert num_rows is not None
        if num_rows % world_size:
            raise ValueError(
                f"{name} has {num_rows} rows, which do not divide evenly among {world_size} ranks; "
                f"pass {name}_split_sizes"
            )
        return (num_rows // world_size,) * world_size
    try:
        rows = tuple(map(operator.index, sizes))
    except TypeError:
        raise TypeError(f"{name}_split_sizes must be a sequence of integers, got {sizes!r}") from None
    if len(rows) != world_size:
        raise ValueError(f"{name}_split_sizes has {len(rows)} entries for a group of {world_size} ranks")
    if min(rows) < 0:
        raise ValueError(f"{name}_split_sizes must not be negative, got {rows[rows.index(min(rows))]} in {rows}")
    if num_rows is None and sum(rows) > _MAX_ROWS:
        raise ValueError(f"{name}_split_sizes {rows} sum to {sum(rows)}, more rows than a tensor can have")
    if num_rows is not None and sum(rows) != num_rows:
        raise ValueError(f"{name}_split_sizes {rows} sum to {sum(rows)}, but {name} has {num_rows} rows")
    return rows


def require_output(output: torch.Tensor, input_: torch.Tensor, source: torch.Tensor) -> None:
    """Raise ``ValueError`` unless an all-to-all of ``input_``, whose values ``source`` has, may write to ``output``."""
    if output.dtype != input_.dtype or output.shape[1:] != input_.shape[1:]:
        raise ValueError(
            f"output has rows of {describe_rows(output)}, input of {describe_rows(input_)}; they must be equal"
        )
    if not output.is_contiguous() or output.is_conj() or output.is_neg():
        raise ValueError(f"output must be contiguous and own its values, got strides {output.stride()}")
    if wants_grad(input_) or wants_grad(output):
        raise ValueError(
            "gradients flow only through an output that all_to_all makes: pass None as output and use the result, or "
            "detach input and output"
        )
    begin, other = output.data_ptr(), source.data_ptr()
    if begin < other + source.nbytes and other < begin + output.nbytes:
        raise ValueError(
            f"input and output overlap in memory: {source.nbytes} bytes at {other:#x}, {output.nbytes} at {begin:#x}"
        )
