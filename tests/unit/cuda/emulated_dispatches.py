"""Dispatches of one node on emulated kernels, one after the other."""

from __future__ import annotations

import torch
from emulated_scenes import Emulated
from simulated_nodes import Rank, request_of

from fusco import Capacity, ExpertPlacement, Settings, StaticRows, Topology
from fusco.cuda.memory.layout import DeviceLayout
from fusco.cuda.within_node.device_plan import DevicePlan
from fusco.engine.base import DispatchRequest
from fusco.planner.routing import Routing

NUM_EXPERTS, NUM_TOPK, NUM_TOKENS = 6, 3, 40


class Repeated:
    """Dispatches into static rows of one node, one after the other, which no host waits for."""

    def __init__(self, folder, order: int, num_ranks: int = 2, timeout_s: float = 60.0, patience: int = 1) -> None:
        capacity = Capacity(max_tokens_per_rank=NUM_TOKENS, max_bytes_per_token=8, num_topk=NUM_TOPK)
        topology = Topology.of_equal_nodes(num_ranks, num_ranks)
        self.layout = DeviceLayout(topology, capacity, Settings(timeout_s=timeout_s))
        self.placement = ExpertPlacement.contiguous(NUM_EXPERTS, num_ranks)
        self.machine = (emulated := Emulated(folder, order, patience)).machine
        self.world = emulated.world(self.layout, self.placement, num_sms=2)

    def request(self, rank: int, number: int, dtype: torch.dtype, num_tokens: int = NUM_TOKENS) -> DispatchRequest:
        """Rows that are like their weights, which are in ``dtype``: the number of the token, and of the dispatch."""
        generator = torch.Generator().manual_seed(100 * number + rank)
        token = torch.arange(1, num_tokens + 1, dtype=torch.float64) + 1000 * number
        weights = token[:, None].expand(-1, NUM_TOPK).to(dtype).contiguous()
        return request_of(
            Routing(torch.randint(-1, NUM_EXPERTS, weights.shape, generator=generator), weights),
            token,
            self.placement,
            static=StaticRows(self.layout.num_ranks * NUM_TOKENS * NUM_TOPK),
        )


def dispatch(at: Rank, request: DispatchRequest) -> tuple[torch.Tensor, DevicePlan]:
    """Rows in all slots there are; the plan says how many of these have something."""
    output = at.dispatch(request)
    return output.rows[0], output.plan
