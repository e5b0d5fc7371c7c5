"""Outputs whose memory is reused after the last reference is gone."""

import threading

import pytest
import torch

from fusco.core.errors import OutputMemoryError
from fusco.cpu.recycler import OutputRecycler

PAGE_BYTES = 2 << 20


def address(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("shape", [(3, 5), (1,), (2, 3, 4), (7, 1)])
def test_shapes_and_dtypes(shape, dtype):
    tensor = OutputRecycler().empty(shape, dtype)
    assert (tensor.shape, tensor.dtype) == (torch.Size(shape), dtype)
    assert tensor.is_contiguous()
    tensor.view(torch.uint8).fill_(1)  # all of it can be written
    assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("shape", [(0,), (0, 5), (4, 0)])
def test_empty_tensors(shape):
    assert OutputRecycler().empty(shape, torch.float32).shape == shape


def test_memory_returns_with_the_last_reference():
    recycler = OutputRecycler()
    first = recycler.empty((1000,), torch.float32)
    where = address(first)
    first.fill_(7)
    del first
    second = recycler.empty((10,), torch.int32)
    assert address(second) == where


def test_views_keep_memory_alive():
    recycler = OutputRecycler()
    row = recycler.empty((4, 4), torch.float32).fill_(5).view(2, 8)[1, 3:]
    array = recycler.empty((4,), torch.int64).fill_(6)[1:].numpy()
    others = [recycler.empty((4, 4), torch.float32).fill_(0) for _ in range(6)]
    assert len({address(tensor) for tensor in [*others, row]}) == 7
    assert row.tolist() == [5.0] * 5
    assert array.tolist() == [6] * 3


def test_autograd_keeps_memory_alive():
    recycler = OutputRecycler()
    rows = recycler.empty((2,), torch.float64).fill_(3)
    weights = torch.ones(2, dtype=torch.float64, requires_grad=True)
    loss = (weights * rows).sum()
    del rows
    recycler.empty((2,), torch.float64).fill_(-1)
    loss.backward()
    assert weights.grad.tolist() == [3.0, 3.0]


def test_a_spare_is_reused_for_sizes_from_half_of_it():
    recycler = OutputRecycler()
    spare = recycler.empty((4 * PAGE_BYTES,), torch.uint8)
    where = address(spare)
    del spare
    too_small = recycler.empty((PAGE_BYTES,), torch.uint8)
    too_large = recycler.empty((4 * PAGE_BYTES + 1,), torch.uint8)
    fitting = recycler.empty((2 * PAGE_BYTES,), torch.uint8)
    assert address(fitting) == where
    assert where not in (address(too_small), address(too_large))


def test_the_smallest_fitting_spare_is_taken():
    recycler = OutputRecycler()
    large, small = (recycler.empty((pages * PAGE_BYTES,), torch.uint8) for pages in (4, 3))
    expected = address(small)
    del large, small
    assert address(recycler.empty((3 * PAGE_BYTES,), torch.uint8)) == expected


@pytest.mark.parametrize(
    ("num_pages", "num_tensors", "num_kept"),
    # As many as two micro-batches release; 32 MiB; more, of which the latest four stay.
    [(1, 6, 6), (1, 16, 16), (1, 18, 16), (4, 4, 4), (4, 6, 4), (16, 6, 4)],
)
def test_no_more_spares_than_allowed_and_none_after_close(num_pages, num_tensors, num_kept):
    recycler = OutputRecycler()
    tensors = [recycler.empty((num_pages * PAGE_BYTES,), torch.uint8) for _ in range(num_tensors + 1)]
    late = tensors.pop()
    released = {address(tensor) for tensor in tensors}
    tensors.clear()
    assert len(recycler._spares) == num_kept
    again = [recycler.empty((num_pages * PAGE_BYTES,), torch.uint8) for _ in range(num_kept)]
    assert released >= {address(tensor) for tensor in again}
    assert not recycler._spares
    recycler.close()
    again.clear()
    del late
    assert len(recycler._spares) == 0


@pytest.mark.parametrize("num_rows", [1 << 44, 1 << 62, 10**30])
def test_an_output_beyond_all_memory_says_how_much_it_is(num_rows):
    recycler = OutputRecycler()
    words = f"an output of {24 * num_rows:,} bytes, {num_rows:,} rows of 24, could not be allocated: "
    with pytest.raises(OutputMemoryError, match=words):
        recycler.empty((num_rows, 2, 3), torch.float32)
    assert recycler.empty((2, 3), torch.float32).shape == (2, 3)


def test_threads_that_take_and_drop_never_share_memory():
    recycler, mixed = OutputRecycler(), []

    def work(mark):
        for _ in range(300):
            tensor = recycler.empty((64,), torch.int64).fill_(mark)
            if (tensor != mark).any():
                mixed.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not mixed


def test_outputs_are_no_views():
    """FSDP2 warns of views, since hooks on one are lost when it is changed in place."""
    recycler = OutputRecycler()
    for shape in ((3, 5), (0, 5), (4,)):
        tensor = recycler.empty(shape, torch.bfloat16)
        assert tensor.shape == shape
        assert tensor.is_contiguous()
        assert not tensor._is_view()
