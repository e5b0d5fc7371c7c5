"""The kernel ``plan_forwarding``: find the tokens of a rank that go to each other node, and pack their routing."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fusco.control.flags import Flags
from fusco.cuda.kernels.abi import I32, POINTER, U64, Memory, Number, address, pinned, struct
from fusco.cuda.kernels.launcher import KernelCall, Launcher, PreparedLaunch
from fusco.cuda.kernels.spares import SpareLimit, Spares, num_together
from fusco.cuda.tuning import PLAN_FORWARDING_THREADS

_LOW_HALF = 0xFFFFFFFF
_ID_BYTES = 4  # of ids in messages
_ALIGNMENT = 16


# ``ForwardingArgs`` of plan_forwarding.cu.
ForwardingArgs = struct(
    "ForwardingArgs",
    (POINTER, "topk_idx topk_weights expert_to_node node_to_tokens token_to_place messages summary"),
    (U64, "message_bytes"),
    (I32, "num_tokens num_experts num_nodes own_node max_rows is_fixed is_overflow_reported sends_invalid_ids"),
    (U64, "ticket"),
)


class MessageOverflow(NamedTuple):
    """Tokens for a node that are more than its message has room for."""

    node: int
    num_tokens: int
    limit: int


class ForwardingSummary:
    """Counts that the kernel writes to host memory.

    For each node a word: its number of tokens, or for this node the first pair whose id is not an expert (the number of
    pairs if there is none). Its high half is the ticket of the launch. Then that id; then, for each node, the first
    overflow: tokens in the high half, and the limit in the low half; zero if there is none.
    """

    def __init__(self, num_nodes: int, own_node: int, device: torch.device) -> None:
        self.num_nodes, self.own_node = num_nodes, own_node
        self._memory = pinned(torch.zeros(2 * num_nodes + 1, dtype=torch.int64, device="cpu"), device)
        self._words, self._of_nodes = Flags(self._memory), self._memory[:num_nodes].numpy().data
        self._overflows = self._memory[num_nodes + 1 :].numpy().data

    @property
    def address(self) -> int:
        """The address, the same on host and device."""
        return self._memory.data_ptr()

    def is_of(self, ticket: int) -> bool:
        """Return whether all words of a launch are here."""
        return all(self._words.load(node) >> 32 & _LOW_HALF == ticket for node in range(self.num_nodes))

    @property
    def num_rows_to_node(self) -> list[int]:
        """Tokens for each node; 0 for this one."""
        words = (self._words.load(node) for node in range(self.num_nodes))
        return [0 if node == self.own_node else word & _LOW_HALF for node, word in enumerate(words)]

    def num_sent(self, ticket: int) -> int:
        """Return the tokens for all other nodes together, of a launch that the host has waited for in some way."""
        words, num_tokens = self._of_nodes.tolist(), 0  # no load of them need acquire, and a loop is quickest
        for word in words:
            assert word >> 32 & _LOW_HALF == ticket, (words, ticket)
            num_tokens += word & _LOW_HALF
        return num_tokens - (words[self.own_node] & _LOW_HALF)

    @property
    def bad_pair(self) -> int:
        """The first pair whose id is not an expert, or the number of pairs."""
        return self._words.load(self.own_node) & _LOW_HALF

    @property
    def bad_id(self) -> int:
        """The id of that pair, once ``is_of`` has been true."""
        return self._words.load(self.num_nodes)

    @property
    def overflow_addresses(self) -> list[int]:
        """Addresses of the int64 of each node that are zero unless it has an overflow."""
        return [self.address + 8 * (self.num_nodes + 1 + node) for node in range(self.num_nodes)]

    def take_overflow(self) -> MessageOverflow | None:
        """Return the largest overflow; clear all."""
        if not any(self._overflows):  # a loop over loads would take five times as long
            return None
        words = [self._words.load(self.num_nodes + 1 + node) for node in range(self.num_nodes)]
        for node in range(self.num_nodes):
            self._words.store(self.num_nodes + 1 + node, 0)
        node = words.index(max(words))
        return MessageOverflow(node, words[node] >> 32, words[node] & _LOW_HALF)


class ForwardingTerms(NamedTuple):
    """Sizes of messages."""

    # tokens for a node beyond these are left out; ``None`` means all tokens, in messages of their size
    max_rows: int | None
    is_overflow_reported: bool  # True if tokens that are left out are an error
    # True if ranks that receive messages are to find invalid ids of this rank; then ``max_rows`` must be the number of
    # tokens
    sends_invalid_ids: bool
    ticket: int  # the number of the launch, below 2**32; 0 if the host does not wait for it


class ForwardingAddresses:
    """Addresses of the tokens that a rank sends to other nodes, and of their places; see ``ForwardingTensors``."""

    def __init__(self, address: Number, num_nodes: int, num_tokens: int) -> None:
        self.address, self.num_nodes, self.num_tokens = address, num_nodes, num_tokens

    def tokens(self, node: int, first: int = 0) -> Number:
        """Return the address of the tokens for a node, from the one at a place on."""
        return self.address + 4 * (node * (self.num_tokens + 1) + first)

    def places(self, node: int) -> Number:
        """Return the address of the places of tokens for a node."""
        return self.address + 4 * (self.num_nodes * (self.num_tokens + 1) + node * self.num_tokens)


class ForwardingTensors(ForwardingAddresses):
    """The tokens that a rank sends to other nodes, in one tensor. No kernel needs views.

    Attributes:
        memory: int32; the tokens for each node, (N, T + 1), ascending, undefined after the last; then the place of each
            token among those for a node, (N, T), -1 for none.
    """

    address: int

    def __init__(self, memory: torch.Tensor, num_nodes: int, num_tokens: int) -> None:
        super().__init__(memory.data_ptr(), num_nodes, num_tokens)
        self.memory = memory

    @staticmethod
    def num_elements(num_nodes: int, num_tokens: int) -> int:
        """Return the elements of ``memory``."""
        return num_nodes * (2 * num_tokens + 1)

    @property
    def node_to_tokens(self) -> torch.Tensor:
        return self.memory[: self.num_nodes * (self.num_tokens + 1)].view(self.num_nodes, -1)

    @property
    def token_to_place(self) -> torch.Tensor:
        return self.memory[self.num_nodes * (self.num_tokens + 1) :].view(self.num_nodes, self.num_tokens)


class ForwardingMemory(Spares[ForwardingTensors]):
    """Memory for plans of the same sizes."""

    def __init__(self, device: torch.device, sizes: tuple[int, int], limit: SpareLimit) -> None:
        """``sizes`` are the numbers of nodes and of tokens."""
        super().__init__(limit)
        self._device, self._sizes = device, sizes

    def _allocate(self) -> list[ForwardingTensors]:
        size = ForwardingTensors.num_elements(*self._sizes)
        memory = torch.empty(num_together(4 * size), size, dtype=torch.int32, device=self._device)
        return [ForwardingTensors(of_plan, *self._sizes) for of_plan in memory.unbind()]


class PackedForwarding(NamedTuple):
    """Where ``plan_forwarding`` writes."""

    plan: ForwardingAddresses
    # address of uint8 (num_nodes - 1, message_bytes), for each other node, ascending: weights, then int32 ids, of as
    # many rows as are sent
    messages: Number


def message_bytes(terms: ForwardingTerms, routing_shape: tuple[int, ...], weight_bytes: int) -> int:
    """Return the bytes of a message with the routing of as many rows as are sent to a node, a multiple of 16."""
    num_tokens, num_topk = routing_shape
    max_rows = num_tokens if terms.max_rows is None else terms.max_rows
    return max(1, -(-max_rows * num_topk * (_ID_BYTES + weight_bytes) // _ALIGNMENT)) * _ALIGNMENT


def plan_forwarding(
    launcher: Launcher,
    published: tuple[Memory, Memory | None],
    topk_shape: tuple[int, ...],
    expert_to_node: torch.Tensor,
    summary: ForwardingSummary,
    terms: ForwardingTerms,
    made: PackedForwarding,
    ticket: Number,
) -> KernelCall:
    """Plan what a rank sends to each other node, and pack the routing of it; the kernel writes ``summary``.

    ``published`` are ids and weights (num_tokens, num_topk), contiguous, weights float32 or float64; an id that is not
    an expert counts as none. ``expert_to_node`` is int32 (num_experts,). ``ticket`` is that of the terms.

    See the twin.
    """
    topk_idx, weights = published
    weight_bytes = 0 if weights is None else weights.element_size()
    made_for = (summary.address, summary.own_node, expert_to_node.data_ptr())
    key = ("plan_forwarding", topk_shape, topk_idx.element_size(), weight_bytes, *made_for, *terms[:-1])
    prepared = launcher.prepared.use(key) or _prepare(launcher, key, expert_to_node, summary, terms)
    return KernelCall(
        prepared,
        {
            "topk_idx": topk_idx.data_ptr(),
            "topk_weights": address(weights),
            "node_to_tokens": made.plan.tokens(0),
            "token_to_place": made.plan.places(0),
            "messages": made.messages,
            "ticket": ticket,
        },
    )


def _prepare(
    launcher: Launcher,
    key: tuple[Any, ...],
    expert_to_node: torch.Tensor,
    summary: ForwardingSummary,
    terms: ForwardingTerms,
) -> PreparedLaunch:
    _, (num_tokens, num_topk), id_bytes, weight_bytes, *_ = key
    arguments = ForwardingArgs(
        expert_to_node=expert_to_node.data_ptr(),
        summary=summary.address,
        message_bytes=message_bytes(terms, (num_tokens, num_topk), weight_bytes),
        num_tokens=num_tokens,
        num_experts=len(expert_to_node),
        num_nodes=summary.num_nodes,
        own_node=summary.own_node,
        max_rows=num_tokens if terms.max_rows is None else terms.max_rows,
        is_fixed=int(terms.max_rows is not None),
        is_overflow_reported=int(terms.is_overflow_reported),
        sends_invalid_ids=int(terms.sends_invalid_ids),
    )
    constants = {"NUM_TOPK": num_topk, "ID_BYTES": id_bytes, "WEIGHT_BYTES": weight_bytes}
    return launcher.prepare(key, constants, arguments, grid=summary.num_nodes, num_threads=PLAN_FORWARDING_THREADS)
