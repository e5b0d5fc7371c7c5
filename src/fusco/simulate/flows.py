"""Flows between ranks in order: hops of a collective, slices of a flow, and the gates that order them.

A *gate* opens some time after the last flow that it waits for, and lets other flows start. Shape symbols: F flows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fusco.core.lanes import IntArray
from fusco.simulate.links import LinkTable
from fusco.simulate.maxmin import Network, new_state, run_flows

FloatArray = npt.NDArray[np.float64]
MOST_FLOWS = 600_000  # flows, or slices, that are simulated one by one
_NUM_SAMPLES = 256
_EXACT = 4096  # flows up to which rates are updated whenever a flow ends
_QUANTUM = 5e-4  # of the busiest link's time, beyond that


@dataclass(frozen=True, eq=False, kw_only=True)
class Hop:
    """Flows that belong together: rank ``src[i]`` sends ``num_bytes[i]`` to rank ``dst[i]``; int64 (F,) each.

    Attributes:
        name: shown in timelines.
        kind: the links that flows use: between nodes, within a node, memory of rank ``src``, or its machine's cores.
        via: the rank of the source's node whose NIC sends, if it is another.
        until: the rank of the destination's node whose NIC receives, if it is another.
        after: hops, by number, that must have ended before.
        waits: for all flows of these hops; for those that arrive at the rank that sends (``holder``); or for all that
            one of the flow's two ranks sends or receives (``ends``).
        latency_us: from the end of a flow until others know.
        is_sliced: the flow is sent in slices; a slice waits for slices of the same number.
        is_proportional: flows of a rank have rates in proportion to their bytes, so that all end together.
        stands_for: more than ``MOST_FLOWS`` flows, with the same bytes on each link; nothing else of these is right.
    """

    name: str
    kind: Literal["between", "within", "memory", "cores"]
    src: IntArray
    dst: IntArray
    num_bytes: IntArray
    via: IntArray | None = None
    until: IntArray | None = None
    after: tuple[int, ...] = ()
    waits: Literal["all", "holder", "ends"] = "holder"
    latency_us: float = 0.0
    is_sliced: bool = False
    is_proportional: bool = False
    stands_for: int = 0

    @classmethod
    def of_matrix(cls, matrix: IntArray, chosen: npt.NDArray[np.bool_] | None = None, **fields: Any) -> Hop:
        """Return a hop with a flow for each entry of a matrix of bytes (R, R) that is not zero, and chosen."""
        src, dst = np.nonzero(matrix if chosen is None else matrix * chosen)
        return cls(src=src, dst=dst, num_bytes=matrix[src, dst], **fields)


@dataclass(frozen=True, eq=False, kw_only=True)
class Program:
    """One collective of a system: hops, of which each waits for earlier ones, after ``start_us``."""

    hops: tuple[Hop, ...]
    start_us: float = 0.0

    @property
    def num_flows(self) -> int:
        """Number of flows, in one slice each."""
        return self.num_slices(None)

    @property
    def is_merged(self) -> bool:
        """True if flows stand for others: then the bytes of links alone are right."""
        return any(hop.stands_for for hop in self.hops)

    def num_slices(self, slice_bytes: int | None) -> int:
        """Return the number of slices of at most ``slice_bytes``."""
        return sum(hop.stands_for or len(hop.num_bytes) * _num_slices(hop, slice_bytes) for hop in self.hops)


@dataclass(frozen=True, eq=False, kw_only=True)
class Flows:
    """Flows as ``run_flows`` takes them; ``hop`` and ``src`` (F,) say to which hop and rank a flow belongs."""

    first: IntArray
    links: IntArray
    sizes: FloatArray
    starts: tuple[IntArray, IntArray, IntArray]
    ends: IntArray
    gates: FloatArray
    hop: IntArray
    src: IntArray


@dataclass(frozen=True, eq=False, kw_only=True)
class Outcome:
    """Times of flows and loads of links.

    Attributes:
        start_us, end_us: float64 (F,).
        link_bytes, link_peak: float64 (L,), bytes, and the highest rate in bytes per us.
        samples: float64 (B, L), bytes of each link in each sample of ``sample_us``.
        num_updates: how often rates were computed.
    """

    start_us: FloatArray
    end_us: FloatArray
    link_bytes: FloatArray
    link_peak: FloatArray
    samples: FloatArray
    sample_us: float
    num_updates: int

    @property
    def makespan_us(self) -> float:
        """Time until the last flow has ended."""
        return float(self.end_us.max(initial=0.0))


@dataclass
class _Builder:
    """Gates and entries while hops are laid out."""

    delays: list[FloatArray] = field(default_factory=list)
    num_gates: int = 0

    def gates(self, number: int, delay_us: float) -> int:
        """Add gates; returns the first."""
        self.delays.append(np.full(number, delay_us))
        self.num_gates += number
        return self.num_gates - number


def lay_out(program: Program, table: LinkTable, slice_bytes: int | None = None) -> Flows:
    """Return the flows of a program, in slices of at most ``slice_bytes`` where hops have them; ``None``: whole flows.

    Without slices, hops that wait for sliced ones begin with them: what is pipelined counts as perfectly so.
    """
    builder, num_ranks = _Builder(), table.topology.world_size
    start = builder.gates(1, program.start_us)
    waits_of = [{hop.waits for hop in program.hops if i in hop.after} for i in range(len(program.hops))]
    num_slices = [_num_slices(hop, slice_bytes) for hop in program.hops]
    all_gate = [builder.gates(1, hop.latency_us) for hop in program.hops]
    rank_gates = [  # of a hop others wait for holders, or for ends; a gate for each rank, and slice
        builder.gates(num_ranks * num_slices[i], hop.latency_us) if waits_of[i] - {"all"} else -1
        for i, hop in enumerate(program.hops)
    ]
    columns: list[tuple[Any, ...]] = []
    opened: list[IntArray] = []  # (gate, flow)
    routes: list[IntArray] = []
    num_flows = 0
    for i, hop in enumerate(program.hops):
        slices, number = num_slices[i], len(hop.num_bytes)
        flow = np.arange(number * slices).reshape(number, slices) + num_flows
        k = np.broadcast_to(np.arange(slices), flow.shape)
        cuts = hop.num_bytes[:, None] * np.arange(slices + 1) // slices
        weight = hop.num_bytes if hop.is_proportional else np.ones(number)
        follower = np.append(flow[:, 1:], np.full((number, 1), -1), axis=1)
        none, gate = np.full_like(flow, -1), rank_gates[i]
        at_dst = none if gate < 0 else gate + hop.dst[:, None] * slices + k
        at_src = gate + hop.src[:, None] * slices + k if "ends" in waits_of[i] else none
        spread = (np.diff(cuts), np.broadcast_to(weight[:, None], flow.shape), np.full_like(flow, all_gate[i]))
        belongs = (np.full_like(flow, i), np.broadcast_to(hop.src[:, None], flow.shape))
        columns.append((*spread, at_dst, at_src, follower, *belongs))
        routes.append(np.repeat(table.routes(hop.kind, hop.src, hop.dst, hop.via, hop.until), slices, axis=0))
        heads = flow[:, 0]
        opened.append(np.stack((np.full(number, start), heads)))
        for earlier in hop.after:
            gates = (all_gate[earlier], rank_gates[earlier], num_slices[earlier])
            opened += _waits(hop, program.hops[earlier], flow, *gates)
        num_flows += flow.size
    sizes, weights, to_all, at_dst, at_src, follower, of_hop, src = (
        np.concatenate([part[j].ravel() for part in columns]) for j in range(8)
    )
    ends = np.stack((to_all, at_dst, at_src, follower), axis=1).astype(np.int64)
    counts = np.bincount(ends[:, :3][ends[:, :3] >= 0], minlength=builder.num_gates).astype(np.float64)
    gate, flow = np.concatenate(opened, axis=1)
    order = np.argsort(gate, kind="stable")
    pending = np.bincount(flow, minlength=num_flows) + np.bincount(follower[follower >= 0], minlength=num_flows)
    first, links = _as_rows(routes)
    return Flows(
        first=first,
        links=links,
        sizes=np.stack((sizes, weights)).astype(np.float64),
        starts=(np.searchsorted(gate[order], np.arange(builder.num_gates + 1)), flow[order], pending.astype(np.int64)),
        ends=ends,
        gates=np.stack((counts, np.concatenate(builder.delays))),
        hop=of_hop,
        src=src,
    )


def _num_slices(hop: Hop, slice_bytes: int | None) -> int:
    if not hop.is_sliced or slice_bytes is None:
        return 1
    return max(1, -(-int(hop.num_bytes.max(initial=0)) // slice_bytes))


def _waits(hop: Hop, earlier: Hop, flow: IntArray, all_gate: int, rank_gate: int, slices: int) -> list[IntArray]:
    """Return pairs (gate, flow) by which a hop's flows wait for an earlier hop."""
    if hop.waits == "all":
        return [np.stack((np.full(len(flow), all_gate), flow[:, 0]))]
    if hop.waits == "ends":
        return [np.stack((rank_gate + end, flow[:, 0])) for end in (hop.src, hop.dst)]
    if not (hop.is_sliced and earlier.is_sliced):
        return [np.stack((rank_gate + hop.src * slices + j, flow[:, 0])) for j in range(slices)]
    if slices == 1 and flow.shape[1] == 1:
        return []
    # Slice k waits for the same share of the earlier hop's slices; the flow's order brings those before.
    pairs = []
    for k in range(flow.shape[1]):
        upto = -(-(k + 1) * slices // flow.shape[1])
        since = -(-k * slices // flow.shape[1])
        pairs += [np.stack((rank_gate + hop.src * slices + j, flow[:, k])) for j in range(since, upto)]
    return pairs


def _as_rows(routes: list[IntArray]) -> tuple[IntArray, IntArray]:
    """Return padded tables of links, -1 for none, as first entries and entries."""
    counts = [(each >= 0).sum(axis=1) for each in routes]
    links = [each[each >= 0] for each in routes]
    return np.append(0, np.concatenate(counts).cumsum()).astype(np.int64), np.concatenate(links)


def run(flows: Flows, table: LinkTable, quantum_us: float | None = None) -> Outcome:
    """Run flows over the links of a table; ``quantum_us`` as in ``run_flows``, by default 0 for few flows.

    Raises ``ValueError`` if flows wait for each other in a circle.
    """
    num_flows, num_links = len(flows.hop), len(table.capacity)
    loads = np.bincount(flows.links, np.repeat(flows.sizes[0], np.diff(flows.first)), num_links) / table.capacity
    busiest_us = float(loads.max(initial=0.0))
    if quantum_us is None:
        quantum_us = busiest_us * _QUANTUM if num_flows > _EXACT else 0.0
    samples, width = np.zeros((_NUM_SAMPLES, num_links)), max(busiest_us, 1e-3) / _NUM_SAMPLES
    gate_first, gate_flows, pending = flows.starts
    network = Network(
        flows.first,
        flows.links,
        flows.sizes[0],
        flows.sizes[1],
        gate_first,
        gate_flows,
        flows.ends,
        flows.gates[1],
        table.capacity,
    )
    state = new_state(network, pending, flows.gates[0])
    width = run_flows(network, state, quantum_us, width, samples)
    *_, num_done, num_updates = state.numbers.tolist()
    if num_done < num_flows:
        raise ValueError(f"{num_flows - num_done} of {num_flows} flows wait for each other")
    return Outcome(
        start_us=state.times[0],
        end_us=state.times[1],
        link_bytes=state.of_links[0],
        link_peak=state.of_links[1],
        samples=samples,
        sample_us=width,
        num_updates=num_updates,
    )
