"""The kernel ``plan_forwarding``: find the tokens of a rank that go to each other node."""

from __future__ import annotations

import ctypes

import torch

from fusco.cuda.kernels.abi import I32, POINTER
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.tuning import PLAN_FORWARDING_THREADS
from fusco.planner.forwarding import DeviceForwarding


class ForwardingArgs(ctypes.Structure):
    """``ForwardingArgs`` of plan_forwarding.cu."""

    _fields_ = [
        *((name, POINTER) for name in ("topk_idx", "expert_to_node", "node_to_tokens", "token_to_place", "summary")),
        *((name, I32) for name in ("num_tokens", "num_experts", "num_nodes", "own_node")),
    ]


def plan_forwarding(
    launcher: Launcher, topk_idx: torch.Tensor, expert_to_node: torch.Tensor, own_node: int, summary: torch.Tensor
) -> DeviceForwarding:
    """Plan what a rank sends to each other node.

    Args:
        launcher: of the rank.
        topk_idx: int32 or int64 (num_tokens, num_topk), contiguous; an id that is no expert counts as none.
        expert_to_node: int32 (num_experts,).
        own_node: nothing crosses to it.
        summary: int64 (num_nodes + 2,), in pinned memory, to be read once the kernel is done: how many tokens go to
            each node; the first pair whose id is no expert, or the number of pairs if there is none; and that id.

    """
    num_tokens, num_nodes = len(topk_idx), len(summary) - 2
    plan = DeviceForwarding(
        node_to_tokens=topk_idx.new_empty(num_nodes, num_tokens + 1, dtype=torch.int32),
        token_to_place=topk_idx.new_empty(num_nodes, num_tokens, dtype=torch.int32),
    )
    arguments = ForwardingArgs(
        topk_idx=topk_idx.data_ptr(),
        expert_to_node=expert_to_node.data_ptr(),
        node_to_tokens=plan.node_to_tokens.data_ptr(),
        token_to_place=plan.token_to_place.data_ptr(),
        summary=summary.data_ptr(),
        num_tokens=num_tokens,
        num_experts=len(expert_to_node),
        num_nodes=num_nodes,
        own_node=own_node,
    )
    constants = {"NUM_TOPK": topk_idx.shape[1], "ID_BYTES": topk_idx.element_size()}
    launcher.launch("plan_forwarding", constants, arguments, grid=num_nodes, num_threads=PLAN_FORWARDING_THREADS)
    return plan
