"""Waiting for what the ranks of a node announce by flags in their shared memory."""

from __future__ import annotations

from collections.abc import Callable

from fusco.control.node_memory import NodeMemory
from fusco.control.watchdog import Watchdog
from fusco.core.errors import Stall


def wait_for_flag(
    memory: NodeMemory,
    watchdog: Watchdog,
    flag: int,
    value: int,
    phase: str,
    expected: str,
    node: int | None = None,
    look: Callable[[], object] = lambda: None,
) -> None:
    """Wait until the flag of every rank of this node has come to ``value``.

    What it announces comes from the rank itself, or, where ``node`` is another one, from its counterpart there.
    ``look`` is called at every look, to move what others wait for.
    """
    topology = memory.layout.topology

    def source(local: int) -> int:
        is_remote = node not in (None, memory.node)
        return topology.node_to_ranks[node if is_remote and node is not None else memory.node][local]

    def missing() -> list[int]:
        return [local for local, flags in enumerate(memory.flags) if flags.load(flag) < value]

    def is_ready() -> bool:
        look()
        return not missing()

    def stall() -> Stall:
        waiting = missing()
        # Whoever should send is waited for, and so is the rank of this node that should pass it on.
        ranks = dict.fromkeys([source(local) for local in waiting] + [memory.ranks[local] for local in waiting])
        ranks.pop(memory.rank, None)
        sources = [source(local) for local in waiting]
        return Stall(phase, tuple(ranks), f"{expected} from each of {len(memory.flags)} ranks", f"none from {sources}")

    watchdog.wait_until(is_ready, stall)
