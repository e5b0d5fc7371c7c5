"""``add_quantized_rows`` against rows that PyTorch dequantises, bit for bit."""

import pytest
import torch

from fusco import Quantize
from fusco.core.quantization import dequantize_rows
from fusco.core.wire import Wire
from fusco.cpu.combine import add_sums, write_sums
from generator import random_of, rows_to_quantize, values
from reference.add_rows import add_rows as reference
from reference.quantize_rows import quantize_rows


@pytest.mark.parametrize("quantize", [Quantize(), Quantize(scale="power-of-two", block=16)], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 19])
def test_sums_that_travelled(quantize, num_rows):
    hidden = 384
    sent = rows_to_quantize(num_rows, hidden, torch.float32).nan_to_num(1.0, 2.0, 3.0)
    wire = Wire.of(torch.bfloat16, hidden, quantize)
    rows = torch.full((num_rows, wire.width), 0xA5, dtype=wire.dtype)
    write_sums(sent, wire, rows)
    assert rows.nbytes == num_rows * wire.row_bytes
    row_to_sum = torch.randperm(23, generator=random_of("which"))[:num_rows]
    ours = values((23, hidden), torch.float32, "sums")
    expected = ours.clone()
    add_sums(rows, wire, row_to_sum, ours)
    reference(dequantize_rows(*quantize_rows(sent, quantize), quantize, torch.float32), row_to_sum, expected)
    assert torch.equal(ours.view(torch.int32), expected.view(torch.int32))


def test_rows_that_are_no_whole_blocks_travel_in_their_dtype():
    assert Wire.of(torch.bfloat16, 100, Quantize()) == Wire(torch.bfloat16, 100)
    assert Wire.of(torch.float64, 128, Quantize()) == Wire(torch.float64, 128)
