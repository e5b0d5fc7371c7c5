"""The kernel ``plan_forwarding``: find the tokens of a rank that go to each other node, and pack their routing."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from fusco.cuda.kernels.abi import I32, POINTER, U32, U64, address
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.tuning import PLAN_FORWARDING_THREADS
from fusco.planner.forwarding import DeviceForwarding
from fusco.planner.routing import Routing

_ID_BYTES = 4  # of ids in messages
_ALIGNMENT = 16


class ForwardingArgs(ctypes.Structure):
    """``ForwardingArgs`` of plan_forwarding.cu."""

    _fields_ = [
        *((name, POINTER) for name in ("topk_idx", "topk_weights", "expert_to_node")),
        *((name, POINTER) for name in ("node_to_tokens", "token_to_place", "messages", "summary")),
        ("message_bytes", U64),
        *((name, I32) for name in ("num_tokens", "num_experts", "num_nodes", "own_node")),
        *((name, I32) for name in ("max_rows", "is_fixed", "is_overflow_reported")),
        ("ticket", U32),
    ]


class ForwardingSummary:
    """Counts that the kernel writes to host memory.

    For each node a word: its number of tokens, or for this node the first pair whose id is no expert (the number of
    pairs if there is none). Its high half is the ticket of the launch. Then that id; then, for each node, the first
    overflow: tokens in the high half, and the limit in the low half; zero if there is none.
    """

    def __init__(self, num_nodes: int, own_node: int) -> None:
        self.num_nodes, self.own_node = num_nodes, own_node
        self._memory = torch.zeros(2 * num_nodes + 1, dtype=torch.int64, device="cpu").pin_memory()
        self._words = (U64 * len(self._memory)).from_address(self._memory.data_ptr())

    @property
    def address(self) -> int:
        """The address, the same on host and device."""
        return self._memory.data_ptr()

    def is_of(self, ticket: int) -> bool:
        """Return whether all words of a launch are here."""
        return all(word >> 32 == ticket for word in self._words[: self.num_nodes])

    @property
    def num_rows_to_node(self) -> list[int]:
        """Tokens for each node; 0 for this one."""
        return [
            0 if node == self.own_node else word & 0xFFFFFFFF for node, word in enumerate(self._words[: self.num_nodes])
        ]

    @property
    def bad_pair(self) -> int:
        """The first pair whose id is no expert, or the number of pairs."""
        return self._words[self.own_node] & 0xFFFFFFFF

    @property
    def bad_id(self) -> int:
        """The id of that pair."""
        return int(self._memory[self.num_nodes])

    def take_overflow(self) -> tuple[int, int, int] | None:
        """Return the largest overflow: the node, its tokens, and the limit; clear all."""
        words = self._words[self.num_nodes + 1 :]
        if not any(words):
            return None
        self._words[self.num_nodes + 1 :] = [0] * self.num_nodes
        node = words.index(max(words))
        return node, words[node] >> 32, words[node] & 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class ForwardingTerms:
    """Sizes of messages."""

    # tokens for a node beyond these are left out; ``None`` means all tokens, in messages of their size
    max_rows: int | None
    is_overflow_reported: bool  # True if tokens that are left out are an error
    ticket: int  # the number of the launch, from 1 on, below 2**32


def plan_forwarding(
    launcher: Launcher,
    routing: Routing,
    expert_to_node: torch.Tensor,
    summary: ForwardingSummary,
    terms: ForwardingTerms,
) -> tuple[DeviceForwarding, torch.Tensor]:
    """Plan what a rank sends to each other node, and pack the routing of it.

    Args:
        launcher: of the rank.
        routing: contiguous; weights of float32 or float64. An id that is no expert counts as none.
        expert_to_node: int32 (num_experts,).
        summary: written by the kernel.
        terms: sizes of messages.

    Returns the plan, and uint8 (num_nodes - 1, ...): a message to each other node, ascending. It is weights, then int32
    ids, of as many rows as are sent; see the twin.
    """
    topk_idx, weights, num_nodes = routing.topk_idx, routing.topk_weights, summary.num_nodes
    num_tokens, max_rows = len(topk_idx), routing.num_tokens if terms.max_rows is None else terms.max_rows
    num_bytes = max_rows * routing.num_topk * (_ID_BYTES + (0 if weights is None else weights.element_size()))
    plan = DeviceForwarding(
        node_to_tokens=topk_idx.new_empty(num_nodes, num_tokens + 1, dtype=torch.int32),
        token_to_place=topk_idx.new_empty(num_nodes, num_tokens, dtype=torch.int32),
    )
    message_bytes = max(1, -(-num_bytes // _ALIGNMENT)) * _ALIGNMENT
    messages = topk_idx.new_empty(num_nodes - 1, message_bytes, dtype=torch.uint8)
    arguments = ForwardingArgs(
        topk_idx=topk_idx.data_ptr(),
        topk_weights=address(weights),
        expert_to_node=expert_to_node.data_ptr(),
        node_to_tokens=plan.node_to_tokens.data_ptr(),
        token_to_place=plan.token_to_place.data_ptr(),
        messages=messages.data_ptr(),
        summary=summary.address,
        message_bytes=message_bytes,
        num_tokens=num_tokens,
        num_experts=len(expert_to_node),
        num_nodes=num_nodes,
        own_node=summary.own_node,
        max_rows=max_rows,
        is_fixed=int(terms.max_rows is not None),
        is_overflow_reported=int(terms.is_overflow_reported),
        ticket=terms.ticket,
    )
    constants = {
        "NUM_TOPK": routing.num_topk,
        "ID_BYTES": topk_idx.element_size(),
        "WEIGHT_BYTES": 0 if weights is None else weights.element_size(),
    }
    launcher.launch("plan_forwarding", constants, arguments, grid=num_nodes, num_threads=PLAN_FORWARDING_THREADS)
    return plan, messages
