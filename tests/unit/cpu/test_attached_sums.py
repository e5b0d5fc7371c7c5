"""Partial sums of a small combine, against those that go through rings, bit for bit."""

import numpy as np
import pytest
import torch

from fusco.core.placement import ExpertPlacement
from fusco.core.rows import ROW_DTYPES, accumulation_dtype
from fusco.cpu.kernels.attached_sums import Holders, add_returned_sums, fold_attached_sums, produce_attached_sums
from fusco.cpu.kernels.plan_pairs import plan_pairs
from fusco.cpu.kernels.sum_rows import Terms
from fusco.planner.dispatch_plan import NodeRouting
from generator import random_of, values
from reference.add_rows import add_rows
from reference.reduce_rows import reduce_rows

NUM_LOCALS, NUM_TOKENS, HIDDEN = 2, 5, 3
SOURCES = np.array([[2, 4, 0], [3, 5, 1]])  # those of other nodes first
FIRST_ROW = np.arange(0, 7 * NUM_TOKENS, NUM_TOKENS)


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
def test_a_holder_adds_the_sums_of_all_ranks_of_its_node_for_its_rows(dtype):
    """Two ranks own three experts each; three nodes have tokens for them."""
    ids = torch.randint(-1, 6, (len(FIRST_ROW[:-1]) * NUM_TOKENS, 3), generator=random_of("ids"), dtype=torch.int32)
    routing, placement = NodeRouting(ids, None, tuple(FIRST_ROW.tolist())), ExpertPlacement.contiguous(6, NUM_LOCALS)
    wide, terms, expected = (
        accumulation_dtype(dtype),
        [],
        torch.zeros(len(ids), HIDDEN, dtype=accumulation_dtype(dtype)),
    )
    for local in range(NUM_LOCALS):
        pairs = plan_pairs(routing, placement, local, tuple(range(NUM_LOCALS)))
        slots = pairs.distribution.pair_to_slot
        rows, weights = (
            values((len(slots), HIDDEN), dtype, "rows", local),
            values((len(slots),), wide, "weights", local),
        )
        terms.append(Terms.of(rows, weights, pairs, local))
        sums = torch.empty_like(expected)
        reduce_rows(rows, pairs.row_to_first_pair, slots, weights, sums)
        is_needed = (pairs.row_to_first_pair.diff() > 0).nonzero().squeeze(1)
        add_rows(sums[is_needed], is_needed, expected)
    places = np.zeros((NUM_LOCALS, NUM_LOCALS, 3 * NUM_TOKENS * HIDDEN), np.float64)  # by producer and holder
    addresses = np.array([[place.ctypes.data for place in of_rank] for of_rank in places])
    for local in range(NUM_LOCALS):
        produce_attached_sums(terms[local], Holders(SOURCES, FIRST_ROW, addresses[local]))
    for local in range(NUM_LOCALS):
        held = torch.cat([torch.arange(NUM_TOKENS) + FIRST_ROW[src] for src in SOURCES[local]])
        sums = torch.full((len(held), HIDDEN), torch.nan, dtype=wide)
        num_read = fold_attached_sums(terms[local], Holders(SOURCES, FIRST_ROW, addresses[:, local].copy()), sums)
        assert torch.equal(sums, expected[held])
        assert num_read == terms[1 - local].row_to_locals[held.numpy(), 1 - local].sum()


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
def test_sums_of_other_nodes_are_added_to_their_tokens_in_order_of_node(dtype):
    sums = values((NUM_TOKENS, HIDDEN), accumulation_dtype(dtype), "sums")
    tokens = [torch.tensor(of_node, dtype=torch.int64) for of_node in ([0, 3], [], [1, 3, 4])]
    returned = [values((len(of_node), HIDDEN), dtype, "returned", node) for node, of_node in enumerate(tokens)]
    expected = sums.clone()
    for rows, of_node in zip(returned, tokens, strict=True):
        add_rows(rows, of_node, expected)
    table = [(rows.data_ptr(), of_node.data_ptr(), len(rows)) for rows, of_node in zip(returned, tokens, strict=True)]
    add_returned_sums(np.array(table), returned[0][:0], sums)
    assert torch.equal(sums, expected)
