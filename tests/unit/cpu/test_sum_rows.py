"""Partial sums through rings, against sums that are computed at once."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fusco.core.placement import ExpertPlacement
from fusco.core.rows import ROW_DTYPES, accumulation_dtype
from fusco.cpu.kernels.plan_pairs import plan_pairs
from fusco.cpu.kernels.sum_rows import Rings, Terms, cut_chunks, fold_sums, has_message, produce_sums
from fusco.planner.dispatch_plan import NodeRouting
from generator import random_of, values
from reference.add_rows import add_rows
from reference.reduce_rows import reduce_rows

NUM_RANKS, NUM_TOKENS, HIDDEN, DEPTH = 3, 5, 4, 2
ROWS_PER_CHUNK = 2
SLOT_BYTES = ROWS_PER_CHUNK * HIDDEN * 8


class Node:
    """Three ranks with rings between them; every rank's experts have made rows of all tokens."""

    def __init__(self, dtype):
        ids = torch.randint(-1, 6, (NUM_RANKS * NUM_TOKENS, 3), generator=random_of("ids"), dtype=torch.int32)
        first_row = tuple(range(0, NUM_RANKS * NUM_TOKENS + 1, NUM_TOKENS))
        routing, placement = NodeRouting(ids, None, first_row), ExpertPlacement.contiguous(6, NUM_RANKS)
        self.counters = np.zeros((2, NUM_RANKS, NUM_RANKS), np.int64)
        self.slots = np.zeros((NUM_RANKS, NUM_RANKS, DEPTH * SLOT_BYTES), np.uint8)
        self.ranks = [self.rank(local, routing, placement, dtype) for local in range(NUM_RANKS)]

    def rank(self, local, routing, placement, dtype):
        first_row = routing.src_to_first_row
        pairs = plan_pairs(routing, placement, local, tuple(range(NUM_RANKS)))
        num_pairs = len(pairs.distribution.pair_to_slot)
        rows = values((num_pairs, HIDDEN), dtype, "rows", local)
        weights = values((num_pairs,), accumulation_dtype(dtype), "weights", local)
        return SimpleNamespace(
            pairs=pairs,
            rows=rows,
            weights=weights,
            terms=Terms.of(rows, weights, pairs, local),
            chunks=cut_chunks(
                np.array([(r, r, first_row[r], first_row[r + 1]) for r in range(NUM_RANKS)]), range(NUM_RANKS), 2
            ),
            rings_out=self.rings([(local, consumer) for consumer in range(NUM_RANKS)]),
            rings_in=self.rings([(producer, local) for producer in range(NUM_RANKS)]),
        )

    def rings(self, between):
        parts = (*self.counters, self.slots)
        addresses = [[part[producer, consumer:].ctypes.data for part in parts] for producer, consumer in between]
        return Rings(np.array(addresses, np.int64), DEPTH, SLOT_BYTES)

    def expected(self, first, end, dtype):
        total = torch.zeros(end - first, HIDDEN, dtype=accumulation_dtype(dtype))
        for rank in self.ranks:
            first_pair = rank.pairs.row_to_first_pair[first : end + 1]
            sums = torch.empty_like(total)
            reduce_rows(rank.rows, first_pair, rank.pairs.distribution.pair_to_slot, rank.weights, sums)
            is_needed = (first_pair.diff() > 0).nonzero().squeeze(1)
            add_rows(sums[is_needed], is_needed, total)
        return total


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
def test_sums_of_all_ranks_through_full_rings(dtype):
    node = Node(dtype)
    for rank in node.ranks:  # each has three chunks of every other rank, and room for two
        produced = produce_sums(rank.terms, rank.chunks, rank.rings_out)
        assert produced.num_chunks == NUM_RANKS - 1
        while produce_sums(rank.terms, rank.chunks, rank.rings_out).num_chunks:
            pass
    assert any(produce_sums(rank.terms, rank.chunks, rank.rings_out).num_left for rank in node.ranks)
    for local, rank in enumerate(node.ranks):
        chunks = [chunk for chunk in rank.chunks.bounds.tolist() if chunk[0] == local]
        assert [end - first for _, first, end in chunks] == [2, 2, 1]
        for _, first, end in chunks:
            sums = torch.full((end - first, HIDDEN), float("nan"), dtype=accumulation_dtype(dtype))
            folded = fold_sums(rank.terms, first, 0, rank.rings_in, sums)
            while folded.next_local < NUM_RANKS:  # until the missing rank has room again
                assert not has_message(rank.rings_in, folded.next_local)
                missing = node.ranks[folded.next_local]
                assert produce_sums(missing.terms, missing.chunks, missing.rings_out).num_chunks
                assert has_message(rank.rings_in, folded.next_local)
                folded = fold_sums(rank.terms, first, folded.next_local, rank.rings_in, sums)
            expected = node.expected(first, end, dtype)
            assert torch.equal(sums.view(torch.uint8), expected.view(torch.uint8))


def test_small_chunks_are_produced_together_up_to_the_rows_of_one():
    node = Node(torch.float32)
    rank = node.ranks[0]
    held = np.array([(1, r, 5 + row, 6 + row) for r, row in enumerate((0, 1, 2))])  # three runs of a row each
    chunks = cut_chunks(held, range(NUM_RANKS), ROWS_PER_CHUNK)
    rank.pairs.row_to_locals[5:8, 0] = True
    assert produce_sums(rank.terms, chunks, rank.rings_out) == (2, 1)
    node.counters[1, 0, 1] += 2  # taken out
    assert produce_sums(rank.terms, chunks, rank.rings_out) == (1, 0)


def test_chunks_of_runs():
    # Rank 0 holds rows of two runs of source 2, which is on another node: ranks 3 and 2 sent them. It has none itself.
    held = np.array([[0, 3, 6, 9], [0, 2, 5, 6], [0, 0, 0, 0], [1, 1, 0, 3]])
    chunks = cut_chunks(held, (0, 1, 2), rows_per_chunk=2)
    # In proportion: the one chunk for rank 2 is between those for rank 3.
    assert chunks.bounds.tolist() == [[3, 6, 8], [2, 5, 6], [3, 8, 9], [1, 0, 2], [1, 2, 3]]
    assert chunks.local_to_chunks.tolist() == [[0, 3], [3, 5], [5, 5]]
