"""Workloads of benchmarks: FUSCO's three traffic patterns (its section 5.2), uniform and skewed routing, traces.

The routing of a rank depends on (seed, rank) alone, so any process can rebuild that of any rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fusco.bench.inputs.arrays import ROUTING, load_arrays
from fusco.bench.inputs.prompts import Batch
from fusco.bench.names import REPLAYED, Pattern
from fusco.core.files import written_beside
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.planner.routing import Routing

_BIMODAL = 0.2  # Beta(0.2, 0.2): most ranks have almost no or almost only remote traffic, as in FUSCO's Fig. 10
_SUFFIXES = (".npz", ".npy")
# The experts that most tokens, or all, choose among: bool (num_experts,).
_EXPERT_SETS: dict[str, Callable[[int], torch.Tensor]] = {
    "hot-experts": lambda num: torch.arange(num, device="cpu") < num // 4,
    "hot-spread": lambda num: torch.arange(num, device="cpu") % 2 == 0,
    "idle-experts": lambda num: torch.arange(num, device="cpu") >= num // 2,
}


@dataclass(frozen=True)
class Trace:
    """Captured routing: ids (num_tokens, num_topk) of one layer, and a name of its source."""

    topk_idx: npt.NDArray[np.int64]
    name: str

    @classmethod
    def load(cls, path: Path | None, key: str | None, layer: int) -> Trace:
        """Read one layer of a trace; see ``load_all``."""
        layers = cls.load_all(path, key)
        if not 0 <= layer < len(layers):
            name = layers[0].name.partition(",")[0] if layers else path
            raise ValueError(f"{name} has layers 0 to {len(layers) - 1}, not {layer}")
        return layers[layer]

    @classmethod
    def load_all(cls, path: Path | None, key: str | None) -> list[Trace]:
        """Read all layers of a trace: an npz or npy file of expert ids, (tokens, layers, topk) or (tokens, topk).

        Without a path, that of Qwen3-30B-A3B, which comes with fusco. ``key`` names the array of an npz file; optional
        if only one has the shape of ids. Raises ``ValueError`` with the contents of the file, or ``OSError``.
        """
        source = path or Path(str(resources.files("fusco.data") / ROUTING))
        ids = _read_ids(source, key)
        if ids.ndim == 2:
            ids = ids[:, None, :]
        if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"{source.name} holds {ids.dtype} {ids.shape}, not ids as (tokens, layers, topk)")
        if ids.size and int(ids.max()) > np.iinfo(np.int64).max:
            raise ValueError(f"{source.name} names expert {ids.max()}, more than int64 holds")
        name = f"{source.stem}{f':{key}' if key else ''}"
        return [cls(ids[:, layer].astype(np.int64), f"{name}, layer {layer}") for layer in range(ids.shape[1])]

    def check(self, num_experts: int, num_topk: int) -> None:
        """Raise ``ValueError`` unless it can be replayed with this many experts, and this many per token."""
        num_tokens, has_topk = self.topk_idx.shape
        if has_topk != num_topk:
            raise ValueError(
                f"the trace has top-{has_topk}, num_topk is {num_topk}: choose --num-topk {has_topk}, or generated "
                f"--traffic"
            )
        if not num_tokens:
            raise ValueError(f"the trace {self.name} has no tokens")
        invalid = np.argwhere((self.topk_idx < -1) | (self.topk_idx >= num_experts))
        if len(invalid):
            token, k = invalid[0]
            raise ValueError(
                f"the trace {self.name} names expert {self.topk_idx[token, k]} (token {token}, k {k}), but there "
                f"are {num_experts}: ids go from 0 to {num_experts - 1}, and -1 means none"
            )


def _read_ids(path: Path, key: str | None) -> npt.NDArray[Any]:
    content = load_arrays(path)
    if "" in content:
        if key:
            raise ValueError(f"{path.name} is a plain array; --trace-key is for npz files")
        return content[""]
    candidates = [name for name, array in content.items() if array.ndim in (2, 3)]
    if key is None and len(candidates) == 1:
        key = candidates[0]
    if key not in content:
        raise ValueError(f"{path.name} has the keys {', '.join(content)}; choose one with --trace-key")
    return content[key]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Input of a benchmark: shapes, pattern, seed.

    With pattern ``"zipf"`` expert ``i`` (from 1) is as popular as ``i ** -skew``: 0 is even, 1 Zipf's law. Those of
    Megatron-LM's pull request 7488: ``"round-robin"`` (its W0), tokens take the experts in turn; ``"hot-experts"`` (W1,
    W2 and the steps of W6), three of four tokens choose among the first quarter; ``"hot-spread"`` (W3), among every
    other one; ``"idle-experts"`` (W5), no token chooses the first half.
    With a ``batch`` ranks have its numbers of tokens, ``tokens`` at most, and the experts of those of the trace.
    Raises ``ValueError`` if pattern and shapes do not fit together.
    """

    pattern: Pattern
    topology: Topology
    placement: ExpertPlacement
    tokens: int
    hidden: int
    num_topk: int
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    skew: float = 1.0
    trace: Trace | None = None
    batch: Batch | None = None

    def __post_init__(self) -> None:
        experts = self.placement.num_experts
        if self.num_topk > experts:
            raise ValueError(f"num_topk is {self.num_topk}, more than the {experts} experts")
        if self.pattern in ("single-node", "imbalanced"):
            self._check_nodes()
        if self.pattern in _EXPERT_SETS and self.num_topk > (allowed := int(_EXPERT_SETS[self.pattern](experts).sum())):
            raise ValueError(f"{self.num_topk} experts per token do not fit in the {allowed} of {self.pattern} traffic")
        if self.pattern == "one-rank" and self.num_topk > len(self.placement.rank_to_experts[0]):
            raise ValueError(f"{self.num_topk} experts per token do not fit on one rank, of {experts} in total")
        if self.pattern in REPLAYED:
            if self.trace is None:
                raise ValueError(f"{self.pattern} traffic needs a trace")
            if (self.batch is None) != (self.pattern == "trace"):
                raise ValueError(f"{self.pattern} traffic {'with' if self.batch else 'without'} a batch")
            self.trace.check(experts, self.num_topk)

    def _check_nodes(self) -> None:
        """Raise unless a token's experts fit on each node and, if all of them may be remote, on the other nodes."""
        owners = (self.topology.rank_to_node[rank] for rank in self.placement.expert_to_rank)
        node_to_num, num_nodes = Counter(owners), self.topology.num_nodes
        for node in range(num_nodes):
            local, remote = node_to_num[node], self.placement.num_experts - node_to_num[node]
            if self.num_topk > local:
                where = f"on one of {num_nodes} nodes: node {node} has {local}"
            elif self.num_topk > remote and num_nodes > 1 and self.pattern == "imbalanced":
                where = f"outside node {node}: the other nodes have {remote}"
            else:
                continue
            raise ValueError(f"{self.num_topk} experts per token do not fit {where}")

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one row."""
        return self.hidden * self.dtype.itemsize

    @property
    def num_repeats(self) -> float:
        """Number of passes over the trace that all ranks' tokens take; 0 without a trace."""
        num_tokens = sum(map(self.num_tokens, range(self.topology.world_size)))
        return num_tokens / len(self.trace.topk_idx) if self.trace else 0.0

    def num_tokens(self, rank: int) -> int:
        """Return the rank's number of tokens."""
        return self.batch.num_tokens[rank] if self.batch else self.tokens

    def rows(self, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the rank's rows (tokens, hidden), drawn on the device; values differ between devices."""
        generator = self._generator(rank, 0, device)
        shape = (self.num_tokens(rank), self.hidden)
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=device).to(self.dtype)

    def routing(self, rank: int) -> Routing:
        """Return the rank's expert ids, int64, and weights, float32, which sum to one for each token."""
        generator = self._generator(rank, 1)
        topk_idx = self._ids(rank, generator)
        weights = _uniform((self.num_tokens(rank), self.num_topk), generator).softmax(dim=1)
        return Routing(topk_idx, weights)

    def _generator(self, rank: int, stream: int, device: torch.device | str = "cpu") -> torch.Generator:
        return torch.Generator(device).manual_seed((self.seed * 65537 + rank) * 2 + stream)

    def _ids(self, rank: int, generator: torch.Generator) -> torch.Tensor:
        if self.trace is not None:
            first = self.batch.first_token[rank] if self.batch else rank * self.tokens
            wanted = first + np.arange(self.num_tokens(rank))
            return torch.from_numpy(self.trace.topk_idx[wanted % len(self.trace.topk_idx)])
        num_experts = self.placement.num_experts
        if self.pattern == "one-expert":
            none = torch.full((self.tokens, self.num_topk), -1, device="cpu")
            return none.index_fill_(1, torch.tensor([0], device="cpu"), 0)
        if self.pattern == "zipf":
            # Gumbel's trick draws without replacement, by a popularity of (expert + 1) ** -skew.
            gumbel = -_uniform((self.tokens, num_experts), generator).log().neg().log()
            popularity = torch.arange(1, num_experts + 1, dtype=torch.float32, device="cpu").log()
            return (gumbel - self.skew * popularity).topk(self.num_topk, dim=1).indices
        if self.pattern == "round-robin":
            pairs = torch.arange(self.tokens * self.num_topk, device="cpu")
            return (pairs % num_experts).view(self.tokens, self.num_topk)
        is_allowed = torch.ones(self.tokens, num_experts, dtype=torch.bool, device="cpu")
        if self.pattern == "one-rank":
            is_allowed &= torch.tensor(self.placement.expert_to_rank, device="cpu") == 0
        elif self.pattern in _EXPERT_SETS:
            is_allowed &= _EXPERT_SETS[self.pattern](num_experts)
            if self.pattern != "idle-experts":
                is_allowed[::4] = True
        elif self.pattern != "uniform":
            expert_to_node = self.placement.membership_table(self.topology.rank_to_node, is_allowed.device)[:-1]
            is_allowed = self._allowed_nodes(rank, generator)[:, expert_to_node]
        scores = _uniform(is_allowed.shape, generator).masked_fill_(~is_allowed, -1.0)
        return scores.topk(self.num_topk, dim=1).indices

    def _allowed_nodes(self, rank: int, generator: torch.Generator) -> torch.Tensor:
        """Return the nodes that each token may go to, bool (tokens, num_nodes)."""
        num_nodes, local_node = self.topology.num_nodes, self.topology.rank_to_node[rank]
        nodes = torch.arange(num_nodes, device="cpu")
        if self.pattern == "single-node":
            return torch.randint(num_nodes, (self.tokens, 1), generator=generator, device="cpu") == nodes
        # Imbalanced: the rank's load is the share of its tokens that leave the node.
        load = np.random.default_rng([self.seed, rank]).beta(_BIMODAL, _BIMODAL) if num_nodes > 1 else 0.0
        is_remote = _uniform((self.tokens, 1), generator) < load
        return is_remote == (nodes != local_node)


@dataclass(frozen=True)
class WorldInput:
    """The rows and the routing of all ranks, which each rank rebuilds to verify what it receives."""

    rows: Sequence[torch.Tensor]
    topk_idx: Sequence[torch.Tensor]
    topk_weights: Sequence[torch.Tensor]

    @classmethod
    def of(cls, workload: Workload, device: torch.device | str = "cpu") -> WorldInput:
        """Rebuild the input of every rank."""
        ranks = range(workload.topology.world_size)
        routings = [workload.routing(rank) for rank in ranks]
        return cls(
            [workload.rows(rank, device) for rank in ranks],
            [routing.topk_idx.to(device) for routing in routings],
            [routing.topk_weights.to(device) for routing in routings if routing.topk_weights is not None],
        )


def world_bytes(workload: Workload) -> int:
    """Return the memory that the rows of a ``WorldInput`` take while they are made, the last rank's in float32."""
    num_elements = workload.tokens * workload.hidden
    return num_elements * (workload.topology.world_size * workload.dtype.itemsize + torch.float32.itemsize)


def internode_rows_lower_bound(workload: Workload) -> int:
    """Count the distinct (token, remote node) pairs of all ranks by brute force, without the planner."""
    expert_to_node = np.array([workload.topology.rank_to_node[r] for r in workload.placement.expert_to_rank])
    total = 0
    for rank, local_node in enumerate(workload.topology.rank_to_node):
        ids = workload.routing(rank).topk_idx.numpy()
        total += sum(len({*expert_to_node[token[token >= 0]]} - {local_node}) for token in ids)
    return total


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return numbers between 0 and 1, independent of PyTorch's default dtype and device."""
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")


def check_trace_path(path: Path) -> None:
    """Raise ``ValueError`` for a path that is not one of a trace."""
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"a trace is a file {' or '.join(_SUFFIXES)}, got {path}")


def write_trace(path: Path, routing: npt.NDArray[np.integer[Any]]) -> None:
    """Write ids (tokens, layers, topk) in the narrowest dtype that can represent them."""
    ids = routing.astype(np.min_scalar_type(int(routing.max(initial=0))))
    with written_beside(path) as beside:
        if path.suffix == ".npz":
            np.savez_compressed(beside, topk_idx=ids)
        else:
            np.save(beside, ids)
