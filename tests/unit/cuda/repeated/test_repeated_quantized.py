"""Quantised dispatches are repeated like others: the layer in front changes addresses and values only."""

from __future__ import annotations

import pytest
import torch
from repeated_rig import NODES, TOPOLOGY, Node, inputs

from fusco import MismatchError, Quantize, StaticRows
from fusco.core.quantization import lay_out_scales
from reference.quantize_rows import quantize_rows as reference

FORMATS = [Quantize(block=16), Quantize(block=16, scale="ue8m0", layout="tma"), Quantize("nvfp4")]


def quantized(comm, step, quantize, static):
    x, ids, weights = inputs(comm.rank, step)
    return x, comm.dispatch(x, ids, weights, quantize=quantize, static=static)


def bits(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


@pytest.mark.parametrize(
    ("topology", "static", "quantize"),
    [
        (TOPOLOGY, None, FORMATS[0]),
        (TOPOLOGY, StaticRows(40), FORMATS[1]),
        (TOPOLOGY, None, FORMATS[2]),
        (NODES, StaticRows(40), FORMATS[0]),
        (NODES, None, FORMATS[1]),
        (NODES, StaticRows(40), FORMATS[2]),
    ],
    ids=str,
)
def test_repeated_dispatches_return_what_others_do(topology, static, quantize, repeats):
    def program(comm, other, _library):
        for step in range(6):
            (_, seen), (_, expected) = (quantized(each, step, quantize, static) for each in (comm, other))
            num_rows = int(seen.num_rows_per_expert.sum())
            for ours, theirs in zip(seen.payloads, expected.payloads, strict=True):
                assert ours.stride() == theirs.stride()
                assert torch.equal(bits(ours[:num_rows]), bits(theirs[:num_rows]))
            back = seen.dequantize()[:num_rows]
            assert torch.equal(back, expected.dequantize()[:num_rows])
            again, theirs = (
                each.combine(sent.dequantize(), sent.handle) for each, sent in ((comm, seen), (other, expected))
            )
            assert torch.equal(again, theirs)

    Node(topology=topology).run(program)
    expected = 2 * (3 if topology is NODES and static is None else 4)  # there the first dispatch counts its rows
    assert repeats() == (expected, expected)


def test_other_options_are_another_input(repeats):
    def program(comm, _other, _library):
        x, ids, _ = inputs(comm.rank, 0)
        for _ in range(4):
            comm.dispatch(x, ids, quantize=FORMATS[0])
        with pytest.raises(MismatchError, match="quantize is"):
            comm.dispatch(x, ids, quantize=Quantize(block=16, scale="power-of-two" if comm.rank else "float32"))
        sent = comm.dispatch(x, ids, quantize=FORMATS[0])
        values, scales = reference(x, FORMATS[0])
        assert sent.rows.dtype == values.dtype
        assert sent.scales.dtype == scales.dtype
        assert lay_out_scales(sent.scales, FORMATS[0], x.shape[1]) is sent.scales

    Node().run(program)
    assert repeats()[0] > 0
