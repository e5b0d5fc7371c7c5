"""Scattered segments of memory, and slices of their bytes."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from fusco import Segments


def of(base, offsets, sizes):
    return Segments(base, torch.tensor(offsets, dtype=torch.int64), torch.tensor(sizes, dtype=torch.int64))


def read(payload, memory):
    pieces = zip(payload.offset_bytes.tolist(), payload.num_bytes.tolist(), strict=True)
    return [byte for offset, size in pieces for byte in memory[offset : offset + size].tolist()]


def cut(payload, slice_bytes):
    return [(piece.offset_bytes.tolist(), piece.num_bytes.tolist()) for piece in payload.slices(slice_bytes)]


def test_slices_cut_segments_where_bytes_say():
    payload = of(torch.arange(10, dtype=torch.uint8), [7, 0, 4], [3, 0, 4])
    assert payload.total_bytes == 7
    assert cut(payload, 2) == [([7], [2]), ([9, 0, 4], [1, 0, 1]), ([5], [2]), ([7], [1])]
    assert cut(payload, 7) == [([7, 0, 4], [3, 0, 4])]
    assert cut(payload, 1000) == [([7, 0, 4], [3, 0, 4])]


def test_nothing_makes_no_slices():
    assert cut(of(torch.empty(0), [], []), 4) == []
    assert cut(of(torch.empty(3), [0, 12, 5], [0, 0, 0]), 4) == []


def test_rows_of_a_matrix_of_any_dtype():
    matrix = torch.arange(6, dtype=torch.int16).view(3, 2)
    payload = Segments.rows(matrix, torch.tensor([2, 0, 2]))
    assert payload.offset_bytes.tolist() == [8, 0, 8]
    assert payload.num_bytes.tolist() == [4, 4, 4]
    assert Segments.rows(torch.empty(0, 5), torch.tensor([], dtype=torch.int64)).total_bytes == 0


@pytest.mark.parametrize(
    ("matrix", "row_idx", "error", "text"),
    [
        (torch.empty(0, 4), torch.tensor([0]), ValueError, r"row_idx\[0\] = 0 is not a row of a base of 0"),
        (torch.ones(3, 4), torch.tensor([2, 1 << 60]), ValueError, r"row_idx\[1\] = 1152921504606846976 is not a row"),
        (torch.ones(3, 4), torch.tensor([-1]), ValueError, r"row_idx\[0\] = -1 is not a row of a base of 3"),
        (torch.ones(3, 4), torch.tensor([1], dtype=torch.int32), TypeError, "row_idx must be .* int64 .* torch.int32"),
        (torch.ones(3, 4), [0], TypeError, "row_idx must be a one-dimensional int64 tensor, got list"),
        (torch.ones(()), torch.tensor([0]), ValueError, "at least one dimension, got a scalar"),
        ([[1]], torch.tensor([0]), TypeError, "need a tensor as their base, got list"),
    ],
)
def test_rows_that_a_matrix_does_not_have(matrix, row_idx, error, text):
    with pytest.raises(error, match=text):
        Segments.rows(matrix, row_idx)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.complex64])
def test_memory_is_the_tensors_own(dtype):
    base = torch.zeros(2, 3, dtype=dtype)
    payload = of(base, [0], [1])
    payload.memory[:] = 1
    assert payload.memory.shape == (6 * dtype.itemsize,)
    assert torch.equal(base.view(torch.uint8).view(-1), torch.ones_like(payload.memory))


def test_memory_of_a_parameter_and_of_a_scalar():
    assert of(torch.nn.Parameter(torch.zeros(2)), [4], [4]).memory.shape == (8,)
    assert of(torch.tensor(1.0), [0], [4]).memory.shape == (4,)


@pytest.mark.parametrize(
    ("offset", "size"), [(-1, 1), (0, -1), (8, 1), (0, 9), (9, 0), (1 << 62, 1 << 62), ((1 << 63) - 1, 1)]
)
def test_segments_outside_their_base_are_refused(offset, size):
    with pytest.raises(ValueError, match=rf"segment 1 \(offset {offset}, {size} bytes\) .* of 8 bytes"):
        of(torch.zeros(2), [0, offset], [8, size])


def test_arrays_of_the_wrong_kind():
    base, good = torch.zeros(4), torch.tensor([0])
    with pytest.raises(TypeError, match=r"offset_bytes .* torch\.int32"):
        Segments(base, good.int(), good)
    with pytest.raises(TypeError, match=r"num_bytes .*\(1, 1\)"):
        Segments(base, good, good.view(1, 1))
    with pytest.raises(TypeError, match=r"offset_bytes .* got list"):
        Segments(base, [0], [8])
    with pytest.raises(TypeError, match=r"num_bytes .* got NoneType"):
        Segments(base, good, None)
    with pytest.raises(TypeError, match="tensor as their base, got str"):
        Segments("base", good, good)
    with pytest.raises(ValueError, match="1 offsets but 2 sizes"):
        Segments(base, good, torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="contiguous"):
        Segments(torch.zeros(4, 4).T, good, good)


def test_nothing_that_happens_to_arrays_or_base_changes_segments():
    offsets, sizes = np.array([4, 0]), torch.tensor([2, 3])
    base = torch.arange(6, dtype=torch.uint8).view(2, 3)
    payload = Segments(base, torch.from_numpy(offsets), sizes)
    offsets[:], sizes[:] = 1 << 40, -1
    payload.offset_bytes.zero_()
    payload.num_bytes.zero_()
    base.t_()
    assert (payload.offset_bytes.tolist(), payload.num_bytes.tolist()) == ([4, 0], [2, 3])
    assert payload.total_bytes == 5
    assert read(payload, payload.memory) == [4, 5, 0, 1, 2]
    assert cut(payload, 4) == [([4, 0], [2, 2]), ([2], [1])]
    with pytest.raises(AttributeError):
        payload.base = base


@pytest.mark.parametrize(
    "base", [torch.arange(12, dtype=torch.int16).view(4, 3)[:1, 1], torch.ones((), dtype=torch.int16).expand(1, 1)]
)
def test_a_base_of_one_element_may_have_any_stride(base):
    assert base.is_contiguous()
    assert read(of(base, [0], [2]), of(base, [0], [2]).memory) == [1, 0]


def test_a_base_whose_memory_does_not_hold_its_values():
    conjugated, negated = torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    for base in (conjugated, negated.expand(2)[:1]):
        with pytest.raises(ValueError, match=r"pass base\.resolve_conj\(\)\.resolve_neg\(\)"):
            of(base, [0], [4])
    with pytest.raises(TypeError, match=r"their base is quantised \(torch.qint8\)"):
        of(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), [0], [4])


@given(
    st.integers(0, 40).flatmap(
        lambda room: st.tuples(
            st.just(room), st.lists(st.tuples(st.integers(0, room), st.integers(0, 9)), max_size=8), st.integers(1, 50)
        )
    )
)
def test_slices_together_are_the_payload(drawn):
    room, wanted, slice_bytes = drawn
    offsets, sizes = [offset for offset, _ in wanted], [min(size, room - offset) for offset, size in wanted]
    payload = of(torch.arange(room, dtype=torch.uint8), offsets, sizes)
    slices = list(payload.slices(slice_bytes))
    assert [byte for piece in slices for byte in read(piece, payload.memory)] == read(payload, payload.memory)
    assert [piece.total_bytes for piece in slices[:-1]] == [slice_bytes] * (len(slices) - 1)
    assert all(0 < piece.total_bytes <= slice_bytes for piece in slices)
