"""Run Megatron's own tests of its flex dispatcher, in bfloat16, by both of its backends on fusco.

``python tools/megatron_tests.py --megatron FOLDER [--device cpu] [--ranks 2] [--json FILE] [--no-deterministic]
[--deep-ep FOLDER]``: the first FOLDER is a checkout of
Megatron-LM at the version of megatron-core that is installed, of which ``tests/unit_tests/test_utilities.py`` and
``tests/unit_tests/transformer/moe/test_token_dispatcher.py`` suffice. Ranks are started by torchrun, each with a GPU,
and find fusco's ``deep_ep``. The cases are those of ``TestFlexDispatcher``, with as many ranks as there are instead of
eight, and without fused permutations, which need TransformerEngine. The permutations that Megatron then uses with its
DeepEP backend add rows in bfloat16, on GPUs in an order that varies, which is more than its test of padding allows:
Megatron runs that test with fused ones only. So PyTorch's deterministic algorithms, for which Megatron has a path of
its own, are enabled; ``--no-deterministic`` leaves them off. With ``--deep-ep`` the folder's package ``deep_ep`` takes
the place of fusco's, to compare. On the CPU ``without_cuda`` is in effect. Exit code 1 if a case failed, or none ran.
"""

# ruff: noqa: PLC0415  megatron-core need not be installed

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

import fusco
from fusco.bench.harness.environment import Measurement, hardware, versions
from fusco.bench.harness.json_lines import write_json_lines
from megatron_steps import do_without_transformer_engine
from parts import folder
from without_cuda import without_cuda

DEEP_EP = Path(fusco.__file__).parent / "integrations" / "path"
TEST = "tests/unit_tests/transformer/moe/test_token_dispatcher.py"
BACKENDS = ("hybridep", "deepep")
# By the method of Megatron's container: what its tests give to it besides what all have.
TESTS: dict[str, dict[str, Any]] = {
    "dispatcher_dropless_test": {},
    "dispatcher_capacity_test": {"moe_token_drop_policy": "probs", "moe_expert_capacity_factor": 0.5},
    "dispatcher_router_padding_for_fp8_test": {"num_moe_experts": 32, "moe_router_topk": 4},
}


@dataclass(frozen=True)
class Case:
    """A test, the backend, and the sizes of its groups."""

    test: str
    backend: str
    tensor_parallel: int
    expert_parallel: int


@dataclass(frozen=True, kw_only=True)
class CaseRecord(Measurement):
    """A case, as it ended."""

    kind: str = "megatron-test"
    test: str
    backend: str
    tensor_parallel: int
    expert_parallel: int
    verified: bool
    seconds: float
    errors: list[str]  # by rank, empty where it passed
    dtype: str = "bfloat16"
    deep_ep: str  # the file of the module of that name
    deterministic: bool  # by PyTorch's deterministic algorithms


def cases_of(num_ranks: int, backends: Sequence[str] = BACKENDS) -> list[Case]:
    """Return all cases, the most important first.

    >>> [case.tensor_parallel for case in cases_of(2)[:12:6]], len(cases_of(4)), len(cases_of(4, ["deepep"]))
    ([1, 2], 18, 9)
    """
    return [
        Case(test, backend, tensor_parallel, num_ranks // tensor_parallel)
        for tensor_parallel in range(1, num_ranks + 1)
        if num_ranks % tensor_parallel == 0
        for backend in backends
        for test in TESTS
    ]


def run_case(container_class: Any, case: Case) -> str:
    """Run a case; return what failed, empty if nothing did."""
    try:
        container = container_class(
            tp_size=case.tensor_parallel,
            ep_size=case.expert_parallel,
            pp_size=1,
            moe_token_dispatcher_type="flex",  # noqa: S106
            moe_flex_dispatcher_backend=case.backend,
            moe_pad_expert_input_to_capacity=False,
            hidden_size=1024,
            test_dtype=torch.bfloat16,
            **TESTS[case.test],
        )
        getattr(container, case.test)()
    except Exception:  # noqa: BLE001  whatever Megatron's code raises is the case's result
        return traceback.format_exc()
    return ""


def run_cases(folder: Path, device: str, log: Path | None) -> list[CaseRecord]:
    """Run all cases on this rank, which torchrun started; rank 0 writes and returns their records."""
    do_without_transformer_engine()
    _replace_training(device)
    sys.path.append(str(folder))  # behind the megatron-core that is installed
    tests = importlib.import_module(TEST.removesuffix(".py").replace("/", "."))
    has_backend = dict(zip(BACKENDS, (tests.is_hybrid_ep_available(), tests.is_deep_ep_available()), strict=True))
    backends = [backend for backend in BACKENDS if has_backend[backend]]
    fused_a2a = importlib.import_module("megatron.core.transformer.moe.fused_a2a")
    utilities = importlib.import_module("tests.unit_tests.test_utilities").Utils
    of_run: dict[str, Any] = {"versions": versions("megatron-core"), "hardware": hardware(device)}
    of_run |= {"deep_ep": str(importlib.import_module("deep_ep").__file__)}
    of_run |= {"deterministic": torch.are_deterministic_algorithms_enabled()}
    records = []
    for case in cases_of(int(os.environ["WORLD_SIZE"]), backends):
        start = time.monotonic()
        failure = run_case(tests.MoEModelTestContainer, case)
        took = time.monotonic() - start
        gc.collect()  # the container: its end is a collective
        fused_a2a.reset_hybrid_ep_buffer()  # as newer versions of these tests do
        utilities.initialize_model_parallel()
        failures: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        utilities.destroy_model_parallel()
        of_case: dict[str, Any] = {"verified": not any(failures), "seconds": round(took, 2), "errors": failures}
        record = CaseRecord(**vars(case), **of_case, **of_run)
        if dist.get_rank() == 0:
            _show(record)
            records.append(record)
            write_json_lines([record], log, appends=True)
    return records


def _show(record: CaseRecord) -> None:
    result = "passed" if record.verified else "FAILED"
    name = f"{record.backend:8} tp {record.tensor_parallel} ep {record.expert_parallel} {record.test:40}"
    sys.stdout.write(f"{name} {result} {record.seconds:6.2f} s\n")
    for rank, error in enumerate(record.errors):
        if error:
            sys.stdout.write(f"rank {rank}: {error}\n")
    sys.stdout.flush()


def _replace_training(device: str) -> None:
    """Give Megatron's tests the one function that they use of ``megatron.training``, which needs much besides."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    def set_random_seed(seed_: int, **_: object) -> None:
        torch.manual_seed(seed_)
        if device == "cuda":
            model_parallel_cuda_manual_seed(seed_)

    for name in ("training", "training.initialize", "training.argument_utils"):
        module: Any = ModuleType(f"megatron.{name}")
        module.__getattr__ = lambda _: None  # what other tests use
        sys.modules[module.__name__] = module
    vars(sys.modules["megatron.training.initialize"])["_set_random_seed"] = set_random_seed


@contextlib.contextmanager
def _on(device: str) -> Iterator[None]:
    """Start the processes' group on the CPU; on GPUs Megatron's tests do it."""
    with contextlib.ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(without_cuda())
            dist.init_process_group("gloo")
        yield
        dist.barrier()
        dist.destroy_process_group()


def run_rank(folder: Path, device: str, log: Path | None, *, is_deterministic: bool) -> int:
    """Run this rank's part; return the exit code."""
    torch.use_deterministic_algorithms(is_deterministic, warn_only=True)
    with _on(device):
        records = run_cases(folder, device, log)
        if records:
            passed = sum(record.verified for record in records)
            sys.stdout.write(f"{passed} of {len(records)} cases passed on {device}\n")
    return int(not all(record.verified for record in records))


def main() -> int:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megatron", type=folder, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--deep-ep", type=folder, default=DEEP_EP)
    chosen = parser.parse_args()
    if importlib.util.find_spec("megatron") is None:
        parser.error("megatron-core is not installed")
    if not (chosen.megatron / TEST).exists():
        parser.error(f"{chosen.megatron} has no {TEST}")
    if "LOCAL_RANK" in os.environ:
        return run_rank(chosen.megatron, chosen.device, chosen.json, is_deterministic=chosen.deterministic)
    if chosen.json:
        chosen.json.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, (str(chosen.deep_ep), str(DEEP_EP.parents[2]), os.environ.get("PYTHONPATH"))))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(chosen.ranks))
    settings = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    environment = {**settings, **os.environ, "PYTHONPATH": path}
    return subprocess.run([*torchrun, *sys.argv], env=environment, check=False).returncode  # noqa: S603  this file


if __name__ == "__main__":
    sys.exit(main())
