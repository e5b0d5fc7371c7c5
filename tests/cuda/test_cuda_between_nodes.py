"""The kernels that pack rows for other nodes, and add what comes back, against their twins, on one GPU."""

import pytest
import torch
from one_rank import taken

from comparison import assert_same_bits
from fusco.core.rows import accumulation_dtype, row_bytes
from fusco.cuda.kernels.abi import RowsAt
from fusco.cuda.kernels.add_returned import ReturnedSums, add_returned as add_on_device
from fusco.cuda.kernels.gather_rows import Part, gather_rows
from generator import any_bits, values
from reference.add_returned import add_returned

pytestmark = pytest.mark.cuda


@pytest.fixture
def launcher(one):
    return one.comm._engine._context.launcher(torch.cuda.current_stream())


def gather(one, launcher, rows, parts):
    """Pack rows into messages, which are on the device."""
    rows, places = rows.to(one.device), [of_message.to(one.device) for of_message, _ in parts]
    messages = [message.data_ptr() for _, message in parts]
    at = [Part(of.data_ptr(), message, len(of)) for of, message in zip(places, messages, strict=True)]
    if call := gather_rows(launcher, rows.data_ptr(), row_bytes(rows), at):
        call.launch(launcher.stream)
    torch.cuda.synchronize()


@pytest.mark.parametrize("shape", [(7168,), (3,), (5, 7), (1001,), (0,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float64], ids=str)
def test_rows_are_packed_in_the_order_of_their_places(one, launcher, shape, dtype):
    rows = any_bits((300, *shape), dtype, "gather", shape)
    for num_places in (0, 1, 7, 1000):
        places = torch.randint(0, 300, (num_places,), generator=torch.Generator().manual_seed(num_places)).int()
        expected = rows.index_select(0, places)
        message = torch.empty(expected.nbytes + 64, dtype=torch.uint8, device=one.device).fill_(0xFF)
        gather(one, launcher, rows, [(places, message)])
        message = message.cpu()
        assert_same_bits(message[: expected.nbytes], expected.view(-1).view(torch.uint8), "the message")
        assert bool((message[expected.nbytes :] == 0xFF).all()), "bytes behind the message were written"


def test_a_row_without_a_place_is_left_as_it_is(one, launcher):
    rows, places = any_bits((9, 40), torch.uint8, "gather"), torch.tensor([4, -1, 0, -1], dtype=torch.int32)
    message = torch.full((4 * 40,), 0xFF, dtype=torch.uint8, device=one.device)
    gather(one, launcher, rows, [(places, message)])
    left = torch.full((40,), 0xFF, dtype=torch.uint8)
    assert_same_bits(message.cpu(), torch.cat([rows[4], left, rows[0], left]), "the message")


@pytest.mark.parametrize("counts", [(3, 0, 5), (0, 0, 900, 1), (700, 1, 0, 0, 300, 0)], ids=str)
def test_rows_for_all_nodes_are_packed_together(one, launcher, counts):
    rows = any_bits((300, 36), torch.uint8, "gather")
    generator = torch.Generator().manual_seed(len(counts))
    places = [torch.randint(0, 300, (count,), generator=generator).int() for count in counts]
    messages = [torch.full((count * 36 + 64,), 0xFF, dtype=torch.uint8, device=one.device) for count in counts]
    gather(one, launcher, rows, list(zip(places, messages, strict=True)))
    for of_node, message in zip(places, messages, strict=True):
        expected = torch.cat([rows.index_select(0, of_node).view(-1), torch.full((64,), 0xFF, dtype=torch.uint8)])
        assert_same_bits(message.cpu(), expected, "a message")


@pytest.mark.parametrize("hidden", [1, 33, 2880, 7168])
@pytest.mark.parametrize(
    ("dtype", "wire_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_what_comes_back_is_added_bit_for_bit(one, launcher, hidden, dtype, wire_dtype):
    for num_tokens, num_remote in ((0, 1), (1, 3), (200, 1), (333, 7)):
        own = values((num_tokens, hidden), accumulation_dtype(dtype), "own", num_remote)
        generator = torch.Generator().manual_seed(num_tokens)
        returned, places = [], []
        for node in range(num_remote):
            comes = torch.rand(num_tokens, generator=generator) < 0.6
            returned.append(values((int(comes.sum()), hidden), wire_dtype, "returned", node))
            places.append(torch.where(comes, comes.cumsum(0) - 1, -1).int())
        out = torch.empty(num_tokens, hidden, dtype=dtype, device=one.device)
        on_device = [[part.to(one.device) for part in parts] for parts in (returned, places)]
        own_sums = own.to(one.device)
        sums = ReturnedSums(*([part.data_ptr() for part in parts] for parts in on_device), wire_dtype)
        if call := add_on_device(launcher, own_sums.data_ptr(), sums, RowsAt.of(out), num_tokens):
            call.launch(launcher.stream)
        if num_tokens:
            assert_same_bits(taken(out), add_returned(own, returned, places, dtype), "add_returned")
