"""Clusters: ranks, their links and constants, each with its source and the results that it was calibrated on.

A cluster is a TOML file: ``[cluster]`` has the shape, ``[constants.NAME]`` a ``value``, its ``source`` and the rows of
``papers.json`` that it was ``trained`` on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from fusco.core.files import written_beside
from fusco.core.integers import check_integer
from fusco.core.topology import Topology

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SUFFIX = ".toml"
DEFAULT_SOURCE = "default, not measured"


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A figure of a cluster: its value, where it is from, and the published results that it was trained on."""

    value: float
    source: str = "given"
    trained: tuple[str, ...] = ()


# Constants that a file may have, and their values without one. 1 GB/s is 1000 bytes a microsecond.
CONSTANTS: dict[str, tuple[float, str]] = {
    "nic_gbs": (50.0, "bytes of a rank's NIC in each direction, GB/s"),
    "nvl_gbs": (450.0, "bytes of a rank within its node in each direction, GB/s"),
    "pair_gbs": (0.0, "bytes from one rank to one other of its node, GB/s; 0: all of nvl_gbs"),
    "memory_gbs": (1500.0, "bytes that a pass rearranges, each read and written once, GB/s"),
    "core_gbs": (0.0, "bytes that all cores of a machine gather, send, distribute and sum, GB/s; 0: no core does"),
    "start_us": (20.0, "time of a collective before its first byte: records, plan, launch"),
    "plan_us": (0.0, "time of a dispatch beside start_us, where a combine has no plan to wait for"),
    "end_us": (0.0, "time of a collective after its last byte"),
    "latency_us": (5.0, "time from the last byte of a message until its receiver goes on"),
    "stage_us": (10.0, "time of a stage between nodes beside its bytes"),
    "slice_mb": (1.0, "size of a slice, 10^6 bytes"),
    "row_us": (0.02, "time in which an expert computes one row"),
}


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Switches between nodes: ``flat`` (nothing but NICs binds), ``rails`` (a switch for each local rank), ``leaves``.

    Args:
        kind: of the switches.
        oversubscription: capacity of NICs below a switch over that of its links to the others; infinite for
            rails that are not connected: rows for another local rank cross NVLink of the sending node.
        nodes_per_leaf: nodes below a switch of ``leaves``.
    """

    kind: Literal["flat", "rails", "leaves"] = "flat"
    oversubscription: float = 1.0
    nodes_per_leaf: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ("flat", "rails", "leaves"):
            raise ValueError(f"fabric must be flat, rails or leaves, got {self.kind!r}")
        if not self.oversubscription >= 1:
            raise ValueError(f"oversubscription must be at least 1, got {self.oversubscription}")
        if self.kind == "leaves" and self.oversubscription == float("inf"):
            raise ValueError("leaves must be connected: their oversubscription is finite")
        check_integer("nodes_per_leaf", self.nodes_per_leaf, least=1)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks, links and constants. ``nic_shares`` are the relative speeds of the NICs of a node's local ranks.

    Nodes share the cores of ``machines``, as those of a testbed; 0: each is a machine.

    Raises ``ValueError`` for constants that are unknown or out of range, with the value.
    """

    name: str
    nodes: int
    ranks_per_node: int
    constants: Mapping[str, Constant]
    nic_shares: tuple[int, ...] = ()
    machines: int = 0
    fabric: Fabric = field(default_factory=Fabric)
    about: str = ""

    def __post_init__(self) -> None:
        check_integer("nodes", self.nodes, least=1)
        check_integer("ranks_per_node", self.ranks_per_node, least=1)
        check_integer("machines", self.machines, least=0)
        if self.machines > self.nodes:
            raise ValueError(f"{self.name}: {self.machines} machines for {self.nodes} nodes, at most one for each")
        _table(self.name, "constants", dict(self.constants), CONSTANTS)
        for name, constant in self.constants.items():
            is_positive = name.endswith(("_gbs", "_mb")) and name not in ("pair_gbs", "core_gbs")
            if not 0 <= constant.value < float("inf") or (is_positive and not constant.value):
                raise ValueError(
                    f"{self.name}: {name} must be {'above' if is_positive else 'at least'} 0, got {constant.value}"
                )
        are_positive = all(isinstance(each, int) and each > 0 for each in self.nic_shares)
        if self.nic_shares and not (are_positive and len(self.nic_shares) == self.ranks_per_node):
            raise ValueError(
                f"{self.name}: nic_shares must be {self.ranks_per_node} integers from 1, got {self.nic_shares}"
            )

    def __getattr__(self, name: str) -> float:
        if name in CONSTANTS:
            return self.constants[name].value if name in self.constants else CONSTANTS[name][0]
        raise AttributeError(f"Cluster has no attribute {name!r}")

    def constant(self, name: str) -> Constant:
        """Return a constant; one that the file lacks has its default as source."""
        return self.constants.get(name) or Constant(value=CONSTANTS[name][0], source=DEFAULT_SOURCE)

    @property
    def topology(self) -> Topology:
        """Nodes and ranks."""
        return Topology.of_equal_nodes(self.nodes * self.ranks_per_node, self.ranks_per_node)

    def resized(self, nodes: int | None = None, ranks_per_node: int | None = None) -> Cluster:
        """Return the same cluster with other numbers of nodes or ranks."""
        changed = ranks_per_node not in (None, self.ranks_per_node)
        if changed and self.nic_shares:
            raise ValueError(
                f"{self.name} has NICs for {self.ranks_per_node} ranks of a node, not for {ranks_per_node}"
            )
        nodes, ranks_per_node = nodes or self.nodes, ranks_per_node or self.ranks_per_node
        return replace(self, nodes=nodes, ranks_per_node=ranks_per_node, machines=min(self.machines, nodes))

    def with_values(self, source: str, **values: float) -> Cluster:
        """Return the same cluster with other constants."""
        changed = {name: Constant(value=value, source=source) for name, value in values.items()}
        return replace(self, constants={**self.constants, **changed})


def names_of_clusters() -> list[str]:
    """Return the names of the clusters that come with fusco."""
    files = resources.files("fusco.simulate") / "clusters"
    return sorted(file.name.removesuffix(_SUFFIX) for file in files.iterdir() if file.name.endswith(_SUFFIX))


def load_cluster(name: str) -> Cluster:
    """Return a cluster by name, or from a TOML file; ``ValueError`` without it and for what is wrong in it."""
    if name in names_of_clusters():
        text = (resources.files("fusco.simulate") / "clusters" / f"{name}{_SUFFIX}").read_text(encoding="utf-8")
    elif name.endswith(_SUFFIX) and not Path(name).is_file():
        raise ValueError(f"there is no file {name}")
    elif name.endswith(_SUFFIX):
        text = Path(name).read_text(encoding="utf-8")
    else:
        raise ValueError(f"{name!r} is no file {_SUFFIX} and none of {', '.join(names_of_clusters())}")
    try:
        return _parse(Path(name).stem, tomllib.loads(text))
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from error


def _parse(name: str, content: Mapping[str, Any]) -> Cluster:
    tables = _table(name, "tables", content, ("cluster", "constants", "fabric"))
    constants = {}
    for key, entry in _table(name, "constants", tables.get("constants", {}), CONSTANTS).items():
        each = _table(name, f"entries of constants.{key}", entry, [of.name for of in fields(Constant)])
        value = _number(name, f"constants.{key}: value", each.get("value"))
        constants[key] = Constant(
            value=value, source=each.get("source", Constant.source), trained=tuple(each.get("trained", ()))
        )
    shape = _table(name, "entries of cluster", tables.get("cluster"), [of.name for of in fields(Cluster)])
    if missing := [each for each in ("nodes", "ranks_per_node") if each not in shape]:
        raise ValueError(f"{name}: cluster lacks {', '.join(missing)}")
    fabric = _table(name, "entries of fabric", tables.get("fabric", {}), [of.name for of in fields(Fabric)])
    _number(name, "fabric: oversubscription", fabric.get("oversubscription", 1.0))
    shares = shape.get("nic_shares", [])
    shape = {"name": name, **shape, "nic_shares": tuple(shares) if isinstance(shares, list) else (shares,)}
    return Cluster(**shape, constants=constants, fabric=Fabric(**fabric))


def _table(name: str, what: str, content: Any, known: Iterable[str]) -> Mapping[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"{name}: {what} must be in a table, got {content!r}")  # noqa: TRY004  it is the file
    if unknown := sorted(set(content) - set(known)):
        raise ValueError(f"{name}: no {what} {', '.join(unknown)}; known are {', '.join(known)}")
    return content


def _number(name: str, what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: {what} must be a number, got {value!r}")  # noqa: TRY004  it is the file
    return float(value)


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster as TOML, which ``load_cluster`` reads."""
    fabric = cluster.fabric
    lines = ["[cluster]", f"name = {_quoted(cluster.name)}", f"about = {_quoted(cluster.about)}"]
    lines += [f"nodes = {cluster.nodes}", f"ranks_per_node = {cluster.ranks_per_node}"]
    lines += [f"nic_shares = {_list(cluster.nic_shares)}"] if cluster.nic_shares else []
    lines += [f"machines = {cluster.machines}"] if cluster.machines else []
    lines += ["", "[fabric]", f"kind = {_quoted(fabric.kind)}", f"oversubscription = {float(fabric.oversubscription)}"]
    lines += [f"nodes_per_leaf = {fabric.nodes_per_leaf}"]
    for name, constant in cluster.constants.items():
        trained = [f"trained = {_list(map(_quoted, constant.trained))}"] if constant.trained else []
        lines += [
            "",
            f"[constants.{name}]",
            f"value = {float(constant.value)!r}",
            f"source = {_quoted(constant.source)}",
        ]
        lines += trained
    with written_beside(path) as beside:
        beside.write_text("\n".join([*lines, ""]), encoding="utf-8")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a basic string of TOML has the same escapes


def _list(items: Any) -> str:
    return f"[{', '.join(map(str, items))}]"


def check_same_shape(cluster: Cluster, topology: Topology) -> None:
    """Raise ``ValueError`` unless the traffic's nodes and ranks are the cluster's."""
    shapes: Sequence[tuple[int, int]] = [(each.num_nodes, each.ranks_per_node) for each in (cluster.topology, topology)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{cluster.name} has {shapes[0][0]} x {shapes[0][1]} ranks, the traffic {shapes[1][0]} x {shapes[1][1]}"
        )
