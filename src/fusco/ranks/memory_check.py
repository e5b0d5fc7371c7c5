"""Check that a benchmark fits into this machine's memory, so that it raises an error instead of swapping."""

from __future__ import annotations

from fusco.core.memory_size import available_memory_bytes
from fusco.ranks.torchrun import launched


def check_room(what: str, bytes_per_rank: int, num_ranks: int) -> None:
    """Raise ``ValueError`` if the ranks on this machine (all, or those that a launcher started here) need too much.

    ``what`` names the memory, with the options that make it smaller; ``bytes_per_rank`` is a lower bound of it.
    """
    job = launched()
    num_local = job.local_world_size if job else num_ranks
    needed, free = bytes_per_rank * num_local, available_memory_bytes()
    if needed > free:
        raise ValueError(
            f"{what} need {needed:,} bytes on {num_local} rank{'s' if num_local > 1 else ''} of this machine, but "
            f"{free:,} are free"
        )
