"""The twin of the kernel ``add_returned`` by hand, then against exact sums."""

from __future__ import annotations

import math

import pytest
import torch

from comparison import assert_same_bits, assert_within
from fusco.core.rows import ROW_DTYPES, accumulation_dtype
from generator import random_of, values
from reference.add_returned import add_returned

HIDDEN = (1, 3, 8, 17)


def places_of(num_tokens: int, num_returned: int, *what: int) -> torch.Tensor:
    """Which tokens have a row among those returned; in any order, as the kernel does not care."""
    places = torch.full((num_tokens,), -1, dtype=torch.int32)
    tokens = torch.randperm(num_tokens, generator=random_of("places", *what))[:num_returned]
    places[tokens] = torch.arange(num_returned, dtype=torch.int32)
    return places


def test_sums_by_hand():
    own = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    returned = [torch.tensor([[10.0, 20.0], [30.0, 40.0]]), torch.tensor([[100.0, 200.0]])]
    places = [torch.tensor([1, -1, 0], dtype=torch.int32), torch.tensor([-1, -1, 0], dtype=torch.int32)]
    expected = [[31.0, 42.0], [3.0, 4.0], [115.0, 226.0]]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        out = add_returned(own, returned, places, dtype)
        assert out.dtype == dtype
        assert out.tolist() == expected
    assert own.tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def test_the_own_sum_comes_first_then_nodes_in_order():
    # In float32, (1 + 1e8) - 1e8 is 0, and (1e8 - 1e8) + 1 is 1.
    place, (one, much) = torch.zeros(1, dtype=torch.int32), (torch.tensor([[1.0]]), torch.tensor([[1e8]]))
    assert add_returned(one, [much, -much], [place, place], torch.float32).item() == 0.0
    assert add_returned(much, [-much, one], [place, place], torch.float32).item() == 1.0


def test_sums_are_rounded_once_at_the_end():
    # 1 and twice 2^-8, half a unit of bfloat16 at 1: rounded in between, both would be lost.
    own, half = torch.tensor([[1.0]]), torch.tensor([[2.0**-8]], dtype=torch.bfloat16)
    place = torch.zeros(1, dtype=torch.int32)
    assert add_returned(own, [half, half], [place, place], torch.bfloat16).item() == 1.0 + 2.0**-7


def test_a_sum_of_zeros_is_a_positive_zero_as_the_kernel_starts_from_one():
    none = torch.tensor([-1], dtype=torch.int32)
    out = add_returned(torch.tensor([[-0.0]]), [torch.empty(0, 1)], [none], torch.float32)
    assert math.copysign(1.0, out.item()) == 1.0


def test_without_tokens_or_rows_of_other_nodes():
    nothing = add_returned(torch.empty(0, 3), [torch.empty(0, 3)], [torch.empty(0, dtype=torch.int32)], torch.float16)
    assert (nothing.shape, nothing.dtype) == ((0, 3), torch.float16)
    own = values((4, 3), torch.float32, "own")
    assert_same_bits(add_returned(own, [], [], torch.float32), own, "sums")
    none = torch.full((4,), -1, dtype=torch.int32)
    assert_same_bits(add_returned(own, [torch.empty(0, 3)], [none], torch.float32), own, "sums")


def test_what_no_token_has_is_not_looked_at():
    returned = torch.tensor([[float("nan")], [2.0]])
    out = add_returned(torch.ones(2, 1), [returned], [torch.tensor([1, -1], dtype=torch.int32)], torch.float32)
    assert out.tolist() == [[3.0], [1.0]]


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
@pytest.mark.parametrize("is_wide", [False, True], ids=["wire as rows", "wire in float32"])
@pytest.mark.parametrize("num_remote", [1, 2, 3, 7])
def test_sums_are_exact_but_for_their_roundings(dtype, is_wide, num_remote):
    accumulation = accumulation_dtype(dtype)
    wire_dtype = torch.promote_types(dtype, torch.float32) if is_wide else dtype
    for seed, hidden in enumerate(HIDDEN):
        num_tokens = 5 + 9 * seed
        counts = [(seed + node) * 3 % (num_tokens + 1) for node in range(num_remote)]
        own = values((num_tokens, hidden), accumulation, seed, "own")
        returned = [values((count, hidden), wire_dtype, seed, "returned", node) for node, count in enumerate(counts)]
        places = [places_of(num_tokens, count, seed, node) for node, count in enumerate(counts)]

        exact, size = own.double().clone(), own.double().abs()
        for rows, of_token in zip(returned, places, strict=True):
            for token, place in enumerate(of_token.tolist()):
                if place >= 0:
                    exact[token] += rows[place].double()
                    size[token] += rows[place].double().abs()
        bound = num_remote * torch.finfo(accumulation).eps * size
        if dtype != accumulation:
            bound = bound + torch.finfo(dtype).eps / 2 * (exact.abs() + bound)
        out = add_returned(own, returned, places, dtype)
        assert out.dtype == dtype
        assert_within(out, exact, bound, f"sums of width {hidden}")
