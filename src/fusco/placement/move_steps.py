"""A move in steps of bounded size: the bytes of each transfer that each step moves."""

from __future__ import annotations

import numpy as np

from fusco.core.integers import check_integer
from fusco.core.lanes import IntArray
from fusco.placement.moves import MovePlan

_NUM_STEPS, _LEAST_STEP_BYTES, _MOST_STEP_BYTES = 8, 8 << 20, 64 << 20  # of a move as fast as possible
_GRANULE = 512  # bytes at whose multiples flows are cut: pages and GPUs copy aligned memory faster


class MoveSteps:
    """A plan in steps: in each, every flow of one rank to another advances by the same share of its bytes.

    So the busiest NIC is the same in all steps, and their bounds add up to the bound of the plan. A flow is the
    transfers between two ranks, one after the other. What a rank passes on leaves it one step after its arrival.

    Args:
        plan: the plan.
        step_bytes: the most bytes that a NIC sends or receives in a step, and a rank within its node, up to rounding.

    Rank 0 gives rank 2 two experts of 1024 bytes in two steps, and rank 2 passes the first on to rank 3:

    >>> from fusco.core.topology import Topology
    >>> from fusco.placement.moves import plan_moves
    >>> old, new = [[0, 1], [-1, -1], [-1, -1], [-1, -1]], [[0, 1], [-1, -1], [0, 1], [0, -1]]
    >>> steps = MoveSteps(plan_moves(old, new, 1024, Topology.of_equal_nodes(4, 2)), step_bytes=512)
    >>> steps.num_steps, [np.subtract(*steps.pieces(step)[::-1]).tolist() for step in range(3)]
    (3, [[1024, 0, 0], [0, 1024, 1024], [0, 0, 0]])
    """

    def __init__(self, plan: MovePlan, step_bytes: int) -> None:
        check_integer("step_bytes", step_bytes, least=1)
        self.plan = plan
        is_passed_on, index = plan.parents >= 0, np.arange(len(plan.experts))
        root = np.where(is_passed_on, plan.parents, index)  # a transfer that is passed on is cut as its parent is
        flows, flow = np.unique(plan.src_ranks * plan.topology.world_size + plan.dst_ranks, return_inverse=True)
        flow = np.where(is_passed_on, len(flows), flow.reshape(-1))
        order = np.argsort(flow, kind="stable")
        num_transfers = np.bincount(flow, minlength=len(flows) + 1)
        position = np.empty_like(order)
        position[order] = index - np.repeat(np.cumsum(num_transfers) - num_transfers, num_transfers)
        num_bytes = num_transfers[:-1] * plan.bytes_per_expert
        num_steps = max(1, -(-max(plan.bound_bytes, _most_within(plan)) // step_bytes))
        size = np.maximum(-(-num_bytes // num_steps), 1)
        size = np.append(-(-size // _GRANULE) * _GRANULE, 1)
        self._size, self._offset = size[flow][root], position[root] * plan.bytes_per_expert
        self._delay = is_passed_on.astype(np.int64)
        self.num_steps = int((-(-num_bytes // size[:-1])).max(initial=0))
        self.num_steps += bool(self.num_steps and is_passed_on.any())

    def pieces(self, step: int) -> tuple[IntArray, IntArray]:
        """Return where the bytes that each transfer moves in a step begin and end in its expert, int64 (M,) each."""
        first = (step - self._delay) * self._size - self._offset
        most = self.plan.bytes_per_expert
        return np.clip(first, 0, most), np.clip(first + self._size, 0, most)


def fast_step_bytes(plan: MovePlan) -> int:
    """Return the ``step_bytes`` of a move that a caller waits for.

    While the bytes of a step cross, those of the step before are passed on within nodes: one large step would leave all
    of that to the end. So the bytes of NICs say how many steps there are; a rank's bytes within its node, which take
    less time, only where there are so many that they would take too much memory at once.

    >>> from fusco.core.topology import Topology
    >>> from fusco.placement.moves import plan_moves
    >>> [fast_step_bytes(plan_moves([[0], [1]], [[1], [0]], size << 20, Topology((0, 1)))) >> 20 for size in (9, 80)]
    [4, 10]
    """
    of_nic, within = plan.bound_bytes, _most_within(plan)
    step_bytes = min(max(of_nic // _NUM_STEPS, _LEAST_STEP_BYTES), _MOST_STEP_BYTES)
    num_steps = max(-(-of_nic // step_bytes), -(-within // _MOST_STEP_BYTES), 1)
    return max(-(-max(of_nic, within) // num_steps), 1)


def _most_within(plan: MovePlan) -> int:
    """Return the most bytes that a rank sends or receives within its node."""
    within = ~plan.crosses
    most = max(np.bincount(ranks[within]).max(initial=0) for ranks in (plan.src_ranks, plan.dst_ranks))
    return int(most) * plan.bytes_per_expert
