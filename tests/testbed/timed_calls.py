"""``python timed_calls.py PATH TOKENS``: a rank that times calls; rank 0 prints a line of JSON for each round of cases.

A round is a file of JSON, PATH followed by its number, for which ranks wait; one that is empty is the last. It has a
list of cases with ``shape`` (hosts, ranks of each), ``rails`` of a rank, ``pattern`` and ``tokens`` (TOKENS at most),
or ``matrix`` and ``bytes`` of a rank; and ``expected``, the predicted ms of each call. Or it has ``nic_gbs``, of a
network that does not bind; the result is then the constants of this machine. Or it has ``file``, where rank 0 writes
the cluster that ``fusco simulate --measure`` would. A line has for each other case the least
ms of each call on the slowest rank. Noise only lengthens calls: they are repeated until each has taken at most
NEAR of what is expected, MOST_CALLS times at most.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import fusco
from fusco.bench.inputs.matrices import make_rank_bytes
from fusco.bench.inputs.traffic import Trace, Workload
from fusco.bench.simulation.measure import measure_cluster, measure_machine
from fusco.core.environment import RAILS_VARIABLE
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.simulate.cluster import load_cluster, write_cluster

NUM_EXPERTS, NUM_TOPK, HIDDEN, DTYPE = 128, 2, 2048, torch.float32  # what cores do is small beside the network
SIZES = (4, 8)
MOST_CALLS, NEAR = 5, 1.08
BALANCERS = {"fusco": "lanes", "no-lanes": "send-and-receive"}  # by name of the simulator's system

Case = dict[str, Any]


def topology_of(case: Case) -> Topology:
    num_hosts, ranks_per_host = case["shape"]
    return Topology.of_equal_nodes(num_hosts * ranks_per_host, ranks_per_host)


def workload_of(case: Case) -> Workload:
    """Return the input of a case, the same in every process."""
    topology, trace = topology_of(case), None
    if case["pattern"] == "trace":
        whole = Trace.load(None, None, 0)
        trace = Trace(whole.topk_idx[:, :NUM_TOPK], whole.name)
    return Workload(
        pattern=case["pattern"],
        topology=topology,
        placement=ExpertPlacement.contiguous(NUM_EXPERTS, topology.world_size),
        tokens=case["tokens"],
        hidden=HIDDEN,
        dtype=DTYPE,
        num_topk=NUM_TOPK,
        trace=trace,
    )


def matrix_of(case: Case) -> Any:
    """Return the bytes from rank to rank of an all-to-all."""
    return make_rank_bytes(case["matrix"], topology_of(case).world_size, case["bytes"], skew=0.8)


class Rank:
    """A rank in all cases; communicators are made once."""

    def __init__(self, most_tokens: int) -> None:
        self.rank, self.rails = dist.get_rank(), os.environ.get(RAILS_VARIABLE, "").split(",")
        self.most_tokens = most_tokens
        self.groups = {size: dist.new_group(range(size)) for size in SIZES}
        self.comms: dict[Any, fusco.Communicator] = {}

    def comm(self, size: int, num_rails: int, balancer: str) -> fusco.Communicator:
        if (key := (size, num_rails, balancer)) not in self.comms:
            rails = ",".join(self.rails[:num_rails]) if num_rails > 1 else ""
            with patch.dict(os.environ, {RAILS_VARIABLE: rails}):
                self.comms[key] = fusco.Communicator(
                    self.groups[size],
                    num_experts=NUM_EXPERTS,
                    num_topk=NUM_TOPK,
                    hidden=HIDDEN,
                    max_tokens_per_rank=self.most_tokens,
                    dtype=DTYPE,
                    balancer=balancer,
                    settings=fusco.Settings(timeout_s=30.0),
                )
        return self.comms[key]

    def calls(self, case: Case) -> list[Callable[[], dict[str, float]]]:
        """Return functions that make calls and return their ms: an all-to-all, or a dispatch and a combine each."""
        size = topology_of(case).world_size
        comm = partial(self.comm, size, case["rails"])
        if "matrix" in case:
            matrix = torch.from_numpy(matrix_of(case))
            sent, received = matrix[self.rank].tolist(), matrix[:, self.rank].tolist()
            data, output = (torch.zeros(sum(sizes), dtype=torch.uint8) for sizes in (sent, received))
            exchange = partial(comm("lanes").all_to_all, output, data, received, sent)
            return [lambda: {"fast dispatch": timed(self.groups[size], exchange)[0]}]
        x, ids = torch.ones(case["tokens"], HIDDEN, dtype=DTYPE), workload_of(case).routing(self.rank).topk_idx

        def shuffle(system: str) -> dict[str, float]:
            of = comm(BALANCERS[system])
            dispatch_ms, there = timed(self.groups[size], lambda: of.dispatch(x, ids))
            combine_ms, _ = timed(self.groups[size], lambda: of.combine(there.rows, there.handle))
            return {f"{system} dispatch": dispatch_ms, f"{system} combine": combine_ms}

        systems = dict.fromkeys(name.split()[0] for name in case["expected"])
        return [partial(shuffle, system) for system in systems]

    def times(self, case: Case) -> dict[str, Any]:
        """Return the least ms of each call; nothing on ranks that have no part in it."""
        dist.barrier()
        size = topology_of(case).world_size
        if self.rank >= size:
            return {}
        if "nic_gbs" in case:
            cluster = load_cluster("testbed").resized(*case["shape"]).with_values("set", nic_gbs=case["nic_gbs"])
            constants = measure_machine(self.groups[size], cluster, "cpu").constants
            return {name: each.value for name, each in constants.items()}
        least = dict[str, float]()
        if "file" in case:
            cluster = measure_cluster(self.groups[size], topology_of(case), "cpu")
            if self.rank == 0:
                write_cluster(cluster, Path(case["file"]))
            return {}
        for call in self.calls(case):
            for _ in range(MOST_CALLS):
                took = call()
                least |= {name: min(ms, least.get(name, ms)) for name, ms in took.items()}
                if all(least[name] <= NEAR * case["expected"][name] for name in took):
                    break
        return {"ms": least}


def timed(group: dist.ProcessGroup, function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the ms of a call on the slowest rank, and its result."""
    dist.barrier(group)
    begin = time.perf_counter()
    result = function()
    took_ms = torch.tensor(1e3 * (time.perf_counter() - begin))
    dist.all_reduce(took_ms, dist.ReduceOp.MAX, group=group)
    return float(took_ms), result


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    this = Rank(int(sys.argv[2]))
    for number in itertools.count():
        while not (path := Path(f"{sys.argv[1]}{number}")).exists():
            time.sleep(0.01)
        if not (cases := json.loads(path.read_text(encoding="utf-8"))):
            break
        results = [this.times(case) for case in cases]
        if this.rank == 0:
            sys.stdout.write(json.dumps(results) + "\n")
            sys.stdout.flush()
    for comm in this.comms.values():
        comm.close()


if __name__ == "__main__":
    main()
