"""Descriptions of device-side waits that timed out."""

from __future__ import annotations

import re

from fusco.core.errors import PeerFailureError, Stall
from fusco.cuda.failure import PHASES, stall_of
from fusco.cuda.kernels.comm import Failure
from fusco.cuda.kernels.compiler import SOURCE_DIR

NODE_RANKS = (4, 5, 6, 7)


def phase_of(name: str) -> int:
    """The index of a phase in the kernels' source."""
    listing = re.search(r"enum Phase : u32 \{([^}]*)\}", (SOURCE_DIR / "comm.cuh").read_text())
    assert listing
    names = [entry.strip() for entry in listing[1].split(",")]
    assert len(names) == len(PHASES)
    return names.index(name)


def test_a_wait_for_a_peer_names_it_and_what_was_seen():
    failure = Failure(is_set=1, phase=phase_of("RECEIVING_ROWS"), peer=2, expected=8, seen=7)
    assert stall_of(failure, NODE_RANKS) == Stall("receiving rows", (6,), "its row of epoch 8", "7")


def test_a_grid_barrier_that_times_out_blames_no_rank():
    # The kernel reports its own rank, and does not know how many blocks arrived.
    failure = Failure(is_set=1, phase=phase_of("GRID_BARRIER"), peer=1, expected=64, seen=0)
    stall = stall_of(failure, NODE_RANKS)
    assert stall.on_ranks == ()
    error = PeerFailureError(rank=5, peers=(), operation="dispatch #3", stall=stall, reason="...", has_left=False)
    assert str(error) == (
        "rank 5 gave up in dispatch #3, phase 'grid barrier', waiting for no other rank: "
        "expected all blocks of a kernel resident on this device at once, which are 64, "
        "saw fewer, as other kernels occupy its SMs. Cause: ..."
    )
