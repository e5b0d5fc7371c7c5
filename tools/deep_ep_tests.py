"""Run a test of DeepEP, unchanged, with the ``deep_ep`` of fusco.

``python tools/deep_ep_tests.py [--device cpu] FILE [ARGUMENT ...]``, where FILE is in a checkout of DeepEP: v1.2.1, its
branch hybrid-ep or main. Tests of main import helpers from DeepEP's own ``deep_ep.utils``: they come from the checkout,
and stubs stand for the compiled part that these name. Processes are forked. Profiles, which look for DeepEP's kernels
by name, are left out; on CPUs what a test measures otherwise runs once, and CUDA is replaced (``without_cuda``).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

import fusco
from without_cuda import fork, without_cuda

OURS = Path(fusco.__file__).parent / "integrations" / "path"


def helpers_of(test: Path) -> ModuleType:
    """Return the module with a test's functions that measure, and make its helpers importable."""
    if (test.parent / "utils.py").exists():  # v1.2.1, hybrid-ep
        sys.path.insert(0, str(test.parent))
        return importlib.import_module("utils")
    folder = next(
        (above / "deep_ep" / "utils" for above in test.parents if (above / "deep_ep" / "utils").is_dir()), None
    )
    if folder is None:
        raise FileNotFoundError(f"no utils.py beside {test}, and no deep_ep/utils in a folder above it")
    utils = importlib.import_module("deep_ep.utils")
    utils.__path__ = [str(folder)]
    compiled = ModuleType("deep_ep._C")
    compiled.EventHandle = utils.EventHandle  # type: ignore[attr-defined]
    sys.modules["deep_ep._C"] = compiled
    return importlib.import_module("deep_ep.utils.testing")


def _bench_once(function: Callable[[], Any], *_: Any, **__: Any) -> tuple[float, float, float]:
    start = time.perf_counter()
    function()
    took = time.perf_counter() - start
    return took, took, took


def _no_profile(
    _: Any, kernel_names: str | tuple[str, ...], *__: Any, num_kernels_per_period: int = 1, **___: Any
) -> Any:
    """Return one second for each kernel that a profile would look for."""
    each = [1.0] * num_kernels_per_period if num_kernels_per_period > 1 else 1.0
    return each if isinstance(kernel_names, str) else [each] * len(kernel_names)


def run_test(test: Path, arguments: list[str], device: str) -> None:
    """Run a test in this process and those that it starts."""
    sys.path.insert(0, str(OURS))
    sys.argv = [str(test), *arguments]
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling the tests' own helpers takes longer than they do
    measures = {"bench_kineto": _no_profile} | ({"bench": _bench_once} if device == "cpu" else {})
    with contextlib.ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(without_cuda())
        helpers = helpers_of(test)
        for name in measures.keys() & vars(helpers).keys():
            stack.enter_context(mock.patch.object(helpers, name, measures[name]))
        stack.enter_context(mock.patch.object(torch.multiprocessing, "spawn", fork))
        runpy.run_path(str(test), run_name="__main__")


def main() -> None:
    """Run the test that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("test", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    chosen = parser.parse_args()
    run_test(chosen.test.resolve(), chosen.arguments, chosen.device)


if __name__ == "__main__":
    main()
