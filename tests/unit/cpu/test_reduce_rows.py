"""``reduce_row`` against its PyTorch twin, bit for bit."""

import pytest
import torch

from fusco.core.rows import ROW_DTYPES, accumulation_dtype
from fusco.cpu.kernels.reduce_rows import as_array, reduce_row
from generator import number_of, random_of, values
from reference.reduce_rows import reduce_rows as reference


def reduce_rows(rows, row_to_first_term, term_to_row, term_weight, sums):
    """The kernel for each row of sums."""
    of_terms, first = (term_to_row.numpy(), term_weight.numpy()), row_to_first_term.numpy()
    for i, total in enumerate(sums.numpy()):
        reduce_row(as_array(rows), first[i], first[i + 1], *of_terms, total)


def both(rows, row_to_first_term, term_to_row, term_weight):
    """The sums of the kernel and of its twin, each written over NaNs."""
    shape = (len(row_to_first_term) - 1, rows.shape[1])
    results = [torch.full(shape, float("nan"), dtype=accumulation_dtype(rows.dtype)) for _ in range(2)]
    for function, sums in zip((reduce_rows, reference), results, strict=True):
        function(rows, row_to_first_term, term_to_row, term_weight, sums)
    return results


def test_sums_by_hand():
    rows = torch.tensor([[1.0], [10.0], [100.0]])
    sums = both(rows, torch.tensor([0, 2, 2, 3]), torch.tensor([2, 0, 1]), torch.tensor([1.0, 2.0, 3.0]))
    assert [s.tolist() for s in sums] == [[[102.0], [0.0], [30.0]]] * 2


def test_terms_are_added_in_their_order_and_products_rounded_first():
    # 1e8 + 1 - 1e8 is 0 in float32, in this order; 3 * (1/3) rounds to 1 before 1 is taken away.
    rows, first = torch.tensor([[1e8], [1.0], [-1e8]]), torch.tensor([0, 3])
    assert both(rows, first, torch.tensor([0, 1, 2]), torch.ones(3))[0].item() == 0.0
    assert both(rows, first, torch.tensor([0, 2, 1]), torch.ones(3))[0].item() == 1.0
    third = torch.tensor([1 / 3])
    rows = torch.tensor([[3.0], [-1.0]])
    sums = both(rows, torch.tensor([0, 2]), torch.tensor([0, 1]), torch.cat([third, torch.ones(1)]))
    assert sums[0].item() == sums[1].item() == 0.0


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 3, 5, 17, 64, 1001])
def test_random_sums(dtype, hidden):
    for seed in range(8):
        num_rows, num_sums = number_of(1, 30, seed, "rows"), number_of(0, 25, seed, "sums")
        num_terms = torch.randint(0, 9, (num_sums,), generator=random_of(seed, "terms"))
        first = torch.cat([torch.zeros(1, dtype=torch.int64), num_terms.cumsum(0)])
        term_to_row = torch.randint(0, num_rows, (int(first[-1]),), generator=random_of(seed, "which"))
        weights = values((len(term_to_row),), accumulation_dtype(dtype), seed, "weights")
        rows = values((num_rows, hidden), dtype, seed, "values")
        ours, expected = both(rows, first, term_to_row, weights)
        assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
def test_no_sums_no_terms_no_width(dtype):
    weightless = torch.zeros(0, dtype=accumulation_dtype(dtype))
    none = torch.zeros(0, dtype=torch.int64)
    assert both(torch.zeros(0, 4, dtype=dtype), torch.zeros(1, dtype=torch.int64), none, weightless)[0].shape == (0, 4)
    for sums in both(torch.zeros(0, 4, dtype=dtype), torch.zeros(4, dtype=torch.int64), none, weightless):
        assert sums.tolist() == [[0.0] * 4] * 3
    both(torch.zeros(2, 0, dtype=dtype), torch.tensor([0, 1]), torch.tensor([1]), torch.ones(1).to(weightless.dtype))
