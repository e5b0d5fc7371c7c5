"""Functions on ranks: outputs of a fixed size that are too small."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from rank_setup import Setup, law_of, poison, poison_recycler

import fusco
from comparison import assert_same_bits
from generator import KINDS, any_bits

HIDDEN, ALIGNMENT = 5, 3


def check_drops(group: dist.ProcessGroup, setup: Setup, seeds: range) -> None:
    """Dispatch into half of the rows needed: rows that fit are in place, and the others are missing from the sums."""
    with setup.open(group) as comm:
        poison_recycler(comm, setup)
        for seed in seeds:
            case = setup.case(KINDS[seed % len(KINDS)], seed, comm.topology.world_size)
            law = law_of(comm, case, ALIGNMENT)
            kept = [law.slots(rank)[: max(1, len(law.slots(rank)) // 2)] for rank in law.ranks]
            x = [any_bits((case.num_tokens(rank), HIDDEN), torch.bfloat16, seed, "x", rank) for rank in law.ranks]

            static = fusco.StaticRows(max(1, len(kept[comm.rank])), on_overflow="drop")
            ids = case.topk_idx(comm.rank)
            sent = comm.dispatch(x[comm.rank], ids, expert_alignment=ALIGNMENT, static=static)
            num_kept = len(kept[comm.rank])
            assert_same_bits(sent.rows[:num_kept], law.rows(comm.rank, x)[:num_kept], f"rows of {case}")
            assert sent.num_rows_needed.tolist() == [len(law.slots(comm.rank))]
            assert int(sent.num_rows_per_expert.sum()) == sum(pair is not None for pair in kept[comm.rank])

            num_terms = torch.zeros(len(ids), 1)
            for pair in filter(None, itertools.chain(*kept)):
                if pair.src == comm.rank:
                    num_terms[pair.token] += 1
            out = comm.combine(torch.ones(static.num_rows, HIDDEN), sent.handle)
            assert_same_bits(out, num_terms.expand(-1, HIDDEN).contiguous(), f"sums of {case}")
            poison(sent.rows, out)
