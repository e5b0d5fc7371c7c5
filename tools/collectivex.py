"""Let SemiAnalysis's CollectiveX judge a backend: its harness, its oracle and its files of results, unchanged.

``torchrun --nproc-per-node 2 tools/collectivex.py --referee FOLDER --json FILE``, where FOLDER is the folder
experimental/CollectiveX of InferenceX (843c625). One run is one mode and one precision, for the tokens of the phase. A
backend is fusco or a file of the referee's own, whose library must be installed. Sizes and numbers of
iterations are the referee's but for ``--trials`` and what is given here; on CPUs times mean nothing. Exit code 0 if
every point passed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parts import folder
from without_cuda import without_cuda

BACKENDS = {
    "fusco": ("collectivex_backend", "FuscoBackend"),
    "deepep-v2": ("ep_deepep_v2", "DeepEPV2Backend"),
    "uccl-ep": ("ep_uccl", "UCCLEPBackend"),
    "nccl-ep": ("ep_nccl", "NCCLEPBackend"),
    "flashinfer-ep": ("ep_flashinfer", "FlashInferEPBackend"),
}
RUNNER = "local"


def options_of_case(chosen: argparse.Namespace, case_id: Any, num_ranks: int) -> list[str]:
    """Return the arguments of the referee's harness for one case of its sweep."""
    sweep = json.loads((chosen.referee / "configs" / "sweep.json").read_text())
    workload, timing = sweep["workload"], sweep["timing"]
    factors = {"backend": chosen.backend, "workload": workload["name"], "ep": num_ranks, "routing": sweep["routing"]}
    factors |= {name: getattr(chosen, name) for name in ("mode", "phase", "precision")}
    num_nodes = num_ranks // chosen.ranks_per_node
    options = {
        **{name: factors[name] for name in ("mode", "phase", "precision", "routing")},
        "case-id": case_id(RUNNER, factors),
        "suite": sweep["suite"],
        "workload-name": workload["name"],
        "version": sweep["version"],
        "seed": workload["seed"],
        "tokens-ladder": chosen.tokens or " ".join(map(str, workload["token_ladders"][chosen.phase])),
        "hidden": chosen.hidden or workload["hidden"],
        "experts": chosen.experts or workload["routed_experts"],
        "topk": workload["topk"],
        "trials": chosen.trials,
        "iters": timing["iters_per_trial"],
        "warmup": chosen.warmup or timing["warmup_iters_per_trial"],
        "chain-iters": timing["chain_iters_per_trial"],
        "chain-trials": min(chosen.trials, timing["chain_trials_per_point"]),
        "chain-drop": timing["chain_drop"],
        "runner": RUNNER,
        "topology-class": RUNNER,
        "transport": "nvlink" if num_nodes == 1 else "nccl",
        "scope": "scale-up" if num_nodes == 1 else "scale-out",
        "scale-up-transport": "nvlink",
        "scale-out-transport": "" if num_nodes == 1 else "nccl",
        "gpus-per-node": chosen.ranks_per_node,
        "scale-up-domain": chosen.ranks_per_node,
        "out": chosen.json,
    }
    return [str(word) for name, value in options.items() for word in (f"--{name}", value)]


def judge(chosen: argparse.Namespace) -> int:
    """Run one case on this rank; return the harness's exit code."""
    rank, num_ranks, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    chosen.ranks_per_node = chosen.ranks_per_node or num_ranks
    sys.path[:0] = [str(chosen.referee / "bench"), str(chosen.referee)]
    harness = importlib.import_module("ep_harness")
    parser = argparse.ArgumentParser()
    harness.add_common_args(parser)
    args = parser.parse_args(options_of_case(chosen, harness.case_id, num_ranks))
    if chosen.device == "cuda":
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local))
        args.runtime_device_product = torch.cuda.get_device_name()
    else:
        dist.init_process_group("gloo")
    args.runtime = {"framework": torch.__version__, "accelerator_runtime": torch.version.cuda}
    module, name = BACKENDS[chosen.backend]
    device = torch.device("cuda", local) if chosen.device == "cuda" else torch.device("cpu")
    backend = getattr(importlib.import_module(module), name)(args, rank, num_ranks, local, device)
    return int(backend.finalize(harness.run_sweep(args, backend, torch, dist, device, rank, num_ranks)))


def new_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--referee", type=folder, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--backend", choices=tuple(BACKENDS), default="fusco")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--mode", choices=("normal", "low-latency"), default="normal")
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--phase", choices=("decode", "prefill"), default="decode")
    parser.add_argument("--ranks-per-node", type=int, help="of a node that the ranks play; all by default")
    parser.add_argument("--trials", type=int, default=16, help="of each point (the referee: 256)")
    for name in ("--warmup", "--hidden", "--experts"):
        parser.add_argument(name, type=int)
    parser.add_argument("--tokens", help="of a rank, with spaces between")
    return parser


def main() -> int:
    """Run what the command line names, as one of ``torchrun``'s ranks."""
    chosen = new_parser().parse_args()
    with without_cuda() if chosen.device == "cpu" else contextlib.nullcontext():
        return judge(chosen)


if __name__ == "__main__":
    sys.exit(main())
