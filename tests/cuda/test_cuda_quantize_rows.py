"""The kernel ``quantize_rows`` against that of the CPU, and quantised dispatches in a graph, on one GPU."""

import pytest
import torch

from comparison import assert_same_bits
from fusco import Quantize, StaticRows
from fusco.core.quantization import QUANTIZED_DTYPES, widened_scales
from generator import random_of, rows_to_quantize
from reference.quantize_rows import quantize_rows as reference

pytestmark = pytest.mark.cuda

FORMATS = [
    Quantize(),
    Quantize(block=256, scale="power-of-two"),
    Quantize(block=16, scale="ue8m0"),
    Quantize("mxfp8"),
    Quantize("mxfp8", rounding="floor"),
    Quantize("nvfp4"),
    Quantize("nvfp4", global_scale=0.0017),
]


def without_nan_bits(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales.float().isnan(), float("nan"), scales.float())


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES, ids=str)
@pytest.mark.parametrize("quantize", FORMATS, ids=str)
def test_ten_thousand_rows_have_the_bits_of_the_reference(one, quantize, dtype):
    x = rows_to_quantize(10_000, 256, dtype)
    expected_values, expected_scales = reference(x, quantize)
    values, scales = one.comm._engine.quantizer().quantize(x.to(one.device), quantize)
    assert_same_bits(values.cpu(), expected_values, "codes")
    assert_same_bits(without_nan_bits(scales.cpu()), without_nan_bits(expected_scales), "scales")


def test_every_float32_exponent_and_code_is_rounded_as_on_the_cpu(one):
    """The conversion instruction, for codes around every one and for NaNs of all signs."""
    bits = torch.randint(-(1 << 31), 1 << 31, (4000, 256), generator=random_of("bits"), dtype=torch.int64)
    x = bits.to(torch.int32).view(torch.float32)
    quantize = Quantize(block=16)
    values, _ = one.comm._engine.quantizer().quantize(x.to(one.device), quantize)
    assert_same_bits(values.cpu(), reference(x, quantize)[0], "codes")


def test_a_replayed_graph_quantises_what_is_there(one):
    quantize = Quantize(scale="ue8m0", layout="tma")
    ids = torch.arange(64, device=one.device).view(64, 1) % 8
    x = torch.zeros(64, 1024, dtype=torch.bfloat16, device=one.device)
    static = StaticRows(64)
    one.comm.dispatch(x, ids, static=static, quantize=quantize)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sent = one.comm.dispatch(x, ids, static=static, quantize=quantize)
    order = ids.view(-1).cpu().sort(stable=True).indices
    for seed in range(3):
        x.copy_(rows_to_quantize(64, 1024, torch.bfloat16, seed))
        graph.replay()
        torch.cuda.synchronize()
        values, scales = reference(x.cpu(), quantize)
        assert_same_bits(sent.rows.cpu(), values[order], "codes")
        wide = widened_scales(sent.scales.cpu(), quantize, 1024)
        assert_same_bits(without_nan_bits(wide), without_nan_bits(scales[order]), "scales")
    del graph, sent
