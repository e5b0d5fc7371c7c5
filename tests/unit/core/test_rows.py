"""Memory of tensors as bytes."""

from __future__ import annotations

import pytest
import torch

from fusco.core.rows import as_bytes, plain
from fusco.engine.base import AllToAllRequest

DTYPES = [torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float8_e5m2, torch.float64, torch.complex64]
# All are contiguous for PyTorch, which ignores strides of tensors with at most one element.
CONTIGUOUS = {
    "a column of one row": lambda dtype: torch.ones(4, 3, dtype=dtype)[:1, 1],
    "a column of no rows": lambda dtype: torch.ones(4, 3, dtype=dtype)[:0, 1],
    "one value expanded": lambda dtype: torch.ones((), dtype=dtype).expand(1, 1),
    "no value expanded": lambda dtype: torch.ones(1, dtype=dtype).expand(0, 1),
    "a row of a transposed matrix": lambda dtype: torch.ones(1, 3, dtype=dtype).T,
    "a scalar": lambda dtype: torch.ones((), dtype=dtype),
    "rows behind others": lambda dtype: torch.ones(4, 3, dtype=dtype)[2:],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", CONTIGUOUS)
def test_bytes_of_any_contiguous_tensor(kind, dtype):
    tensor = CONTIGUOUS[kind](dtype)
    assert tensor.is_contiguous()
    memory = as_bytes(tensor)
    assert (memory.dtype, memory.shape) == (torch.uint8, (tensor.nbytes,))
    assert memory.tolist() == as_bytes(tensor.clone(memory_format=torch.contiguous_format)).tolist()
    memory.zero_()  # the memory is not a copy
    assert not tensor.to(torch.float64 if not tensor.is_complex() else torch.complex128).any()


def test_the_memories_of_an_exchange():
    column, value = torch.ones(4, 3)[:1, 1], torch.zeros(()).expand(1)
    exchange = AllToAllRequest(input=column, output=value, send_rows=[1], receive_rows=[1])
    source, target = exchange.memories
    target.copy_(source)
    assert value.tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.int4, torch.uint1, torch.bits8, torch.float4_e2m1fn_x2, *DTYPES], ids=str)
def test_rows_of_any_dtype_and_stride_are_made_contiguous(dtype):
    memory = torch.arange(2 * 12 * dtype.itemsize, dtype=torch.uint8).view(2, -1)
    rows = memory.view(dtype)[:, ::3]
    of_bytes = memory.view(2, -1, dtype.itemsize)[:, ::3]
    assert as_bytes(plain(rows)).tolist() == of_bytes.flatten().tolist()
    assert plain(rows).dtype == dtype
