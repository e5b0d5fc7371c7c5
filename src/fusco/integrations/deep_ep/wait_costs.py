"""How long a rank waits for each other one: DeepEP's statistics that tell which rank is slow."""

from __future__ import annotations

from time import perf_counter_ns

import torch

from fusco.api.communicator import Communicator
from fusco.core.current_stream import is_capturing


def waits_for_ranks(comm: Communicator, verb: str, num_ranks: int, device: torch.device) -> list[int]:
    """Return how much later than this one each rank has come to a call, in nanoseconds; two collectives.

    Ranks need no common clock: each measures how long it waits for the last of all, and tells that to the others. So
    the costs are right to the time that an agreement takes. A rank has come once its device has done what was launched
    on the current stream: the host waits for it, and cannot in the capture of a graph (``ValueError``).
    """
    if is_capturing():
        raise ValueError(
            f"the waits of a {verb} are measured by the host, which is not in a CUDA graph: give no statistics"
        )
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    begin = perf_counter_ns()
    comm.agree(f"arrival at a {verb}")
    waited = perf_counter_ns() - begin
    costs, numbers = [0] * num_ranks, comm.topology.numbers
    for number, (of_rank,) in zip(numbers, comm.agree(f"waits of a {verb}", [waited]), strict=True):
        costs[number] = max(0, waited - of_rank)
    return costs
