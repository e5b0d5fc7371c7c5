"""Partial sums of combine: of the rows of one rank for the others of its node, and of all of them at the holder.

Sums are exchanged through the rings between the ranks. All sums are rounded and added in a fixed order, so results do
not depend on timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import carray  # type: ignore[attr-defined]  # not in its list of exports

from fusco.control.flags import load_acquire_at, store_release_at
from fusco.core.compiled import compiled
from fusco.core.rows import accumulation_dtype
from fusco.cpu.kernels.add_rows import add_row
from fusco.cpu.kernels.intrinsics import pointer_to
from fusco.cpu.kernels.plan_pairs import PlannedPairs
from fusco.cpu.kernels.reduce_rows import as_array, reduce_row
from fusco.planner.sending import in_proportion


class Terms(NamedTuple):
    """Rows of one rank, and what their sums consist of, as arrays."""

    rows: npt.NDArray[Any]  # of the experts, (S, H); 16-bit floats as integers of their bits
    pair_to_slot: npt.NDArray[np.int64]  # int64 (P,)
    pair_weights: npt.NDArray[Any]  # (P,), of the dtype of the sums
    row_to_first_pair: npt.NDArray[np.int64]  # int64 (M + 1,), of the node's routing
    row_to_locals: npt.NDArray[np.bool_]  # bool (M, L): ranks with a sum for the row
    local: int  # local rank that has ``rows``
    scratch: npt.NDArray[Any]  # one sum, float32 or float64 (hidden,)

    @classmethod
    def of(cls, rows: torch.Tensor, pair_weights: torch.Tensor | None, pairs: PlannedPairs, local: int) -> Terms:
        """Take contiguous rows of ``ROW_DTYPES``, the weights of their pairs, by default ones, and a plan."""
        dtype, distribution = accumulation_dtype(rows.dtype), pairs.distribution
        pair_to_slot = distribution.pair_to_slot.numpy()
        numpy_dtype = np.float64 if dtype == torch.float64 else np.float32
        weights = np.ones(len(pair_to_slot), numpy_dtype) if pair_weights is None else pair_weights.to(dtype).numpy()
        tables = pairs.row_to_first_pair.numpy(), pairs.row_to_locals.numpy()
        return cls(as_array(rows), pair_to_slot, weights, *tables, local, np.empty(rows.shape[1], numpy_dtype))

    @property
    def hidden(self) -> int:
        """Elements of a row."""
        return self.scratch.size

    @property
    def sum_bytes(self) -> int:
        """Bytes of a sum."""
        return self.scratch.nbytes


class Rings(NamedTuple):
    """Rings between one rank and each rank of its node."""

    # int64 (ranks_per_node, 3): of the counts of messages put in and taken out, and of slot 0
    addresses: npt.NDArray[np.int64]
    depth: int  # slots of each
    slot_bytes: int  # size of a slot


class Chunks(NamedTuple):
    """Rows of a node that are summed and sent together, by the rank that holds them."""

    bounds: npt.NDArray[np.int64]  # int64 (num_chunks, 3): the rank that the sums go to, first row and end
    local_to_chunks: npt.NDArray[np.int64]  # int64 (ranks_per_node, 2): for each rank, its first chunk and their end
    rows_per_chunk: int  # at most


def cut_chunks(held_rows: npt.NDArray[np.int64], ranks: Sequence[int], rows_per_chunk: int) -> Chunks:
    """Cut the rows that the ``ranks`` of a node hold into chunks.

    ``held_rows`` is int64 (num_runs, 4), by holder: its local rank, the rank that the sums go to, first row and end.
    Sums that a holder returns to other nodes are in proportion (see ``in_proportion``), its own are last.

    >>> held_rows = np.array([[0, 2, 2, 8], [0, 3, 8, 9], [0, 0, 0, 1], [1, 1, 1, 2]])
    >>> cut_chunks(held_rows, ranks=(0, 1), rows_per_chunk=2).bounds.tolist()
    [[2, 2, 4], [2, 4, 6], [3, 8, 9], [2, 6, 8], [0, 0, 1], [1, 1, 2]]
    """
    chunks = Chunks(*_cut_chunks(held_rows, len(ranks), rows_per_chunk), rows_per_chunk)
    for rank, (first, end) in zip(ranks, chunks.local_to_chunks.tolist(), strict=True):
        of_holder = chunks.bounds[first:end]
        returned = of_holder[of_holder[:, 0] != rank]
        if len(set(returned[:, 0].tolist())) < len(returned):  # else it is a chunk for each, and the order stays
            of_holder[: len(returned)] = returned[in_proportion(returned[:, 0])]
    return chunks


@compiled(nogil=True)
def _cut_chunks(held_rows: Any, num_locals: int, rows_per_chunk: int) -> Any:
    num_rows = (held_rows[:, 3] - held_rows[:, 2]).sum()
    bounds = np.empty((len(held_rows) + num_rows // rows_per_chunk, 3), np.int64)
    local_to_chunks = np.zeros((num_locals, 2), np.int64)
    num_chunks, i = 0, 0
    for local in range(num_locals):
        local_to_chunks[local, 0] = num_chunks
        while i < len(held_rows) and held_rows[i, 0] == local:
            for first in range(held_rows[i, 2], held_rows[i, 3], rows_per_chunk):
                end = min(first + rows_per_chunk, held_rows[i, 3])
                bounds[num_chunks, 0], bounds[num_chunks, 1], bounds[num_chunks, 2] = held_rows[i, 1], first, end
                num_chunks += 1
            i += 1
        local_to_chunks[local, 1] = num_chunks
    return bounds[:num_chunks], local_to_chunks


class Produced(NamedTuple):
    """Result of ``produce_sums``: chunks produced now, and those still to do."""

    num_chunks: int
    num_left: int


def produce_sums(terms: Terms, chunks: Chunks, rings: Rings) -> Produced:
    """Write this rank's sums for the next chunk of every other rank into its ring, unless the ring is full.

    Small chunks follow until they have the rows of one. The first chunks of the ranks become the next ones to do, in
    place.
    """
    return Produced(*_produce_sums(terms, chunks, rings))


class Folded(NamedTuple):
    """Result of ``fold_sums``: the local rank whose sums are to be added next, and rows read from other ranks."""

    next_local: int
    num_peer_rows: int


def fold_sums(terms: Terms, first: int, next_local: int, rings: Rings, sums: torch.Tensor) -> Folded:
    """Add the sums of all ranks of the node for one chunk, in order of rank, as far as they have arrived.

    The chunk begins with row ``first``. ``next_local`` is the local rank to continue with; 0 sets all sums to zero
    first. ``sums``, float32 or float64 (num_rows of the chunk, hidden), are changed in place.
    """
    return Folded(*_fold_sums(terms, first, next_local, rings, sums.numpy()))


def has_message(rings: Rings, local: int) -> bool:
    """Return whether a local rank has put in a message that has not been taken out."""
    return bool(_has_message(rings.addresses, local))


@compiled(nogil=True)
def _has_message(addresses: Any, local: int) -> Any:
    return load_acquire_at(addresses[local, 0]) > load_acquire_at(addresses[local, 1])


@compiled(nogil=True, error_model="numpy")
def _reduce(terms: Any, row: int, total: Any) -> None:
    first, end = terms.row_to_first_pair[row], terms.row_to_first_pair[row + 1]
    reduce_row(terms.rows, first, end, terms.pair_to_slot, terms.pair_weights, total)


@compiled(nogil=True)
def _slot(rings: Any, local: int, count: int, num_rows: int, scratch: Any) -> Any:
    address = rings.addresses[local, 2] + count % rings.depth * rings.slot_bytes
    return carray(pointer_to(address), (num_rows, scratch.size), scratch.dtype)


@compiled(nogil=True)
def _has_terms(terms: Any, chunk: Any) -> Any:
    return terms.row_to_locals[chunk[1] : chunk[2], terms.local].any()


@compiled(nogil=True, error_model="numpy")
def _produce_sums(terms: Any, chunks: Any, rings: Any) -> Any:
    num_locals, num_produced, num_left = len(rings.addresses), 0, 0
    for step in range(1, num_locals):  # so that producers start with different consumers
        consumer = (terms.local + step) % num_locals
        chunk, end = chunks.local_to_chunks[consumer]
        num_rows = 0
        while chunk < end and num_rows < chunks.rows_per_chunk:
            _, first, last = chunks.bounds[chunk]
            if _has_terms(terms, chunks.bounds[chunk]):
                produced: Any = load_acquire_at(rings.addresses[consumer, 0])
                consumed: Any = load_acquire_at(rings.addresses[consumer, 1])
                if produced - consumed >= rings.depth:
                    break
                sums, i = _slot(rings, consumer, produced, last - first, terms.scratch), 0
                for row in range(first, last):
                    if terms.row_to_locals[row, terms.local]:
                        _reduce(terms, row, sums[i])
                        i += 1
                store_release_at(rings.addresses[consumer, 0], produced + 1)
                num_rows += last - first
                num_produced += 1
            chunk += 1
        chunks.local_to_chunks[consumer, 0] = chunk
        num_left += end - chunk
    return num_produced, num_left


@compiled(nogil=True, error_model="numpy")
def _fold_sums(terms: Any, first: int, next_local: int, rings: Any, sums: Any) -> Any:
    end, num_peer_rows = first + len(sums), 0
    if next_local == 0:
        sums[:] = 0
    while next_local < len(rings.addresses):
        is_needed = terms.row_to_locals[first:end, next_local]
        if next_local == terms.local:
            for i in range(len(sums)):
                if is_needed[i]:
                    _reduce(terms, first + i, terms.scratch)
                    add_row(terms.scratch, sums[i])
        elif is_needed.any():
            produced, consumed = rings.addresses[next_local, 0], rings.addresses[next_local, 1]
            number: Any = load_acquire_at(consumed)
            if load_acquire_at(produced) <= number:
                break
            message = _slot(rings, next_local, number, len(sums), terms.scratch)
            num_rows = 0
            for i in range(len(sums)):
                if is_needed[i]:
                    add_row(message[num_rows], sums[i])
                    num_rows += 1
            store_release_at(consumed, number + 1)
            num_peer_rows += num_rows
        next_local += 1
    return next_local, num_peer_rows
