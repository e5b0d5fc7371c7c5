"""Partial sums of a small combine: of the rows of one rank for each holder, of all ranks at the holder, of all nodes.

A holder has the rows of its counterparts and its own, in order of node but its own last. Sums for it are in this order,
too, without those of rows that the rank has no terms for. All are rounded and added in the order of ``sum_rows``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]  # not in its list of exports

from fusco.core.compiled import compiled
from fusco.core.lanes import IntArray
from fusco.cpu.kernels.add_rows import add_row
from fusco.cpu.kernels.intrinsics import pointer_to
from fusco.cpu.kernels.reduce_rows import as_array, reduce_row
from fusco.cpu.kernels.sum_rows import Terms


class Holders(NamedTuple):
    """Rows that the ranks of a node hold, and where the sums of one rank are, or those for it."""

    sources: IntArray  # int64 (ranks_per_node, num_nodes): the ranks whose rows a local rank holds, in their order
    first_row: IntArray  # int64 (world_size + 1,): the first row of each rank in the node's routing
    addresses: IntArray  # int64 (ranks_per_node,): of the sums for each local rank, or of each


def produce_attached_sums(terms: Terms, holders: Holders) -> None:
    """Write this rank's sums for every other rank of its node to their addresses."""
    _produce(terms, holders)


def fold_attached_sums(terms: Terms, holders: Holders, sums: torch.Tensor) -> int:
    """Add the sums of all ranks of the node for the rows that this one holds, in order of rank.

    ``sums`` is float32 or float64 (rows held, hidden). Returns the number of sums read from other ranks.
    """
    return int(_fold(terms, holders, sums.numpy()))


def add_returned_sums(returned: IntArray, like: torch.Tensor, sums: torch.Tensor) -> None:
    """Add the sums that other nodes returned, in order of node.

    Args:
        returned: int64 (num_nodes, 3): for each other node the address of its sums, that of the tokens that they are of
            (int64, contiguous), and their number.
        like: the dtype of the sums that were returned, and the size of a row, (0, hidden).
        sums: float32 or float64 (num_tokens, hidden), of this node; changed in place.
    """
    _add_returned(returned, as_array(like), sums.numpy())


@compiled(nogil=True, error_model="numpy")
def _reduce(terms: Any, row: int, total: Any) -> None:
    first, end = terms.row_to_first_pair[row], terms.row_to_first_pair[row + 1]
    reduce_row(terms.rows, first, end, terms.pair_to_slot, terms.pair_weights, total)


@compiled(nogil=True)
def _sum_at(address: int, terms: Any) -> Any:
    return carray(pointer_to(address), terms.scratch.shape, terms.scratch.dtype)


@compiled(nogil=True, error_model="numpy")
def _produce(terms: Any, holders: Any) -> None:
    for holder in range(len(holders.sources)):
        if holder == terms.local:
            continue
        address = holders.addresses[holder]
        for src in holders.sources[holder]:
            for row in range(holders.first_row[src], holders.first_row[src + 1]):
                if terms.row_to_locals[row, terms.local]:
                    _reduce(terms, row, _sum_at(address, terms))
                    address += terms.scratch.nbytes


@compiled(nogil=True, error_model="numpy")
def _fold(terms: Any, holders: Any, sums: Any) -> int:
    addresses, i, num_peer_rows = holders.addresses.copy(), 0, 0
    for src in holders.sources[terms.local]:
        for row in range(holders.first_row[src], holders.first_row[src + 1]):
            sums[i] = 0
            for local in range(len(addresses)):
                if not terms.row_to_locals[row, local]:
                    continue
                if local == terms.local:
                    _reduce(terms, row, terms.scratch)
                    add_row(terms.scratch, sums[i])
                else:
                    add_row(_sum_at(addresses[local], terms), sums[i])
                    addresses[local] += terms.scratch.nbytes
                    num_peer_rows += 1
            i += 1
    return num_peer_rows


@compiled(nogil=True, error_model="numpy")
def _add_returned(returned: Any, like: Any, sums: Any) -> None:
    for i in range(len(returned)):
        num_rows = returned[i, 2]
        rows = carray(pointer_to(returned[i, 0]), (num_rows, sums.shape[1]), like.dtype)
        tokens = carray(pointer_to(returned[i, 1]), (num_rows,), np.int64)
        for j in range(num_rows):
            add_row(rows[j], sums[tokens[j]])
