"""Metrics of a communicator: counters of calls, seconds and bytes, for Prometheus or as a text file.

    python examples/metrics.py              # two ranks on the CPU; prints what Prometheus would read
    torchrun --nproc-per-node 2 examples/metrics.py --port 9400     # serves it, rank r on port 9400 + r

With the package prometheus_client rank 0's counters are served over HTTP; without it, or without ``--port``, each rank
writes them to ``fusco-metrics-RANK.prom``, which node_exporter's textfile collector reads.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fusco

NAMES = {
    "fusco_calls_total": "collectives that are complete",
    "fusco_seconds_total": "seconds of this rank in them, by part",
    "fusco_bytes_total": "bytes that this rank moved in them, by kind",
}


def samples(counters: fusco.CallCounters) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield the name, labels and value of each counter."""
    for verb, totals in counters.by_verb.items():
        yield "fusco_calls_total", {"verb": verb}, totals.calls
        for part, seconds in totals.seconds_by_part.items():
            yield "fusco_seconds_total", {"verb": verb, "part": part}, seconds
        for kind, num_bytes in totals.bytes.items():
            yield "fusco_bytes_total", {"verb": verb, "kind": kind}, num_bytes


def as_text(counters: fusco.CallCounters) -> str:
    """Return the counters in Prometheus' text format."""
    lines = []
    for name, about in NAMES.items():
        lines += [f"# HELP {name} {about}", f"# TYPE {name} counter"]
        for sample, labels, value in samples(counters):
            if sample == name:
                labelled = ",".join(f'{key}="{label}"' for key, label in labels.items())
                lines.append(f"{name}{{{labelled}}} {value}")
    return "\n".join(lines) + "\n"


def serve(counters: fusco.CallCounters, port: int) -> bool:
    """Serve the counters on a port with prometheus_client; return whether it is installed."""
    try:
        from prometheus_client import REGISTRY, start_http_server
        from prometheus_client.core import CounterMetricFamily
    except ImportError:
        return False

    class Collector:
        def collect(self) -> Iterator[Any]:
            for name, about in NAMES.items():
                chosen = [(labels, value) for sample, labels, value in samples(counters) if sample == name]
                family = CounterMetricFamily(name, about, labels=list(chosen[0][0]) if chosen else [])
                for labels, value in chosen:
                    family.add_metric(list(labels.values()), value)
                yield family

    REGISTRY.register(Collector())
    start_http_server(port)
    return True


def run(rank: int, world_size: int, port: int | None, folder: Path) -> None:
    """Dispatch and combine on one rank, and count."""
    if "MASTER_PORT" not in os.environ:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    counters = fusco.CallCounters()
    with fusco.Communicator(num_experts=8, num_topk=2, max_tokens_per_rank=None, hidden=256) as comm:
        comm.add_profile_hook(counters)
        is_served = port is not None and serve(counters, port + rank)
        for _ in range(10):
            x, ids = torch.randn(64, 256, dtype=torch.bfloat16), torch.rand(64, 8).topk(2).indices
            sent = comm.dispatch(x, ids, torch.ones(64, 2))
            comm.combine(sent.rows, sent.handle)
    if not is_served:
        (folder / f"fusco-metrics-{rank}.prom").write_text(as_text(counters))
    if rank == 0:
        print(as_text(counters), end="")
    dist.destroy_process_group()


def main() -> None:
    """Run on the ranks of torchrun, or start two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, help="serve on this port, and the next ones")
    parser.add_argument("--folder", type=Path, default=Path(), help="of the text files")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options.port, options.folder)
    else:
        mp.spawn(run, (2, options.port, options.folder), nprocs=2)


if __name__ == "__main__":
    main()
