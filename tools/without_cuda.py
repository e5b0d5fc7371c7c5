"""Run code that names CUDA on CPUs: models and tests of frameworks, unchanged."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Replaces CUDA devices in arguments of PyTorch's functions by the CPU, and does not pin memory."""

    def __torch_function__(
        self, function: Callable[..., Any], _: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function, or return the tensor that would move to a GPU."""
        if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        options = {name: _of_cpu(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return function(*map(_of_cpu, args), **options)


class _Nothing:
    """A stream, an event or a range of a profiler that does nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> type[_Nothing]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing  # a method's result, such as an event that a stream has recorded

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Event(_Nothing):
    """An event that knows when the host recorded it."""

    def record(self, *_: object) -> None:
        """Take the time."""
        self._time_s = time.perf_counter()

    def elapsed_time(self, later: Event) -> float:
        """Return the milliseconds until another event."""
        return (later._time_s - self._time_s) * 1e3


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Let code that names CUDA run on the CPU: factories, moves, streams, NCCL's process groups."""
    set_default_device, init_process_group = torch.set_default_device, dist.init_process_group
    all_to_all_single, all_gather_into_tensor = dist.all_to_all_single, dist.all_gather_into_tensor

    def init(backend: str | None = None, *args: Any, device_id: Any = None, **options: Any) -> None:  # noqa: ARG001
        init_process_group("gloo" if backend == "nccl" else backend, *args, **options)

    def exchange(output: Any, input: Any, *splits: Any, **options: Any) -> Any:  # noqa: A002  torch's name
        sizes: dict[str, Any] = {
            name: each.tolist() if torch.is_tensor(each) else each for name, each in options.items()
        }
        if input.dtype.itemsize == 1:  # gloo has no FP8
            output, input = output.view(torch.uint8), input.view(torch.uint8)  # noqa: A001
        return all_to_all_single(output, input, *splits, **sizes)

    def gather(output: Any, input: Any, *given: Any, **options: Any) -> Any:  # noqa: A002
        stacked = output.flatten(0, 1) if output.ndim > input.ndim else output  # gloo has the rows of ranks only
        return all_gather_into_tensor(stacked, input, *given, **options)

    replaced: dict[Any, dict[str, Any]] = {
        torch: {"set_default_device": lambda device: set_default_device(_of_cpu(device))},
        dist: {"init_process_group": init, "all_to_all_single": exchange, "all_gather_into_tensor": gather},
        torch.multiprocessing: {"spawn": fork},
        torch.cuda: {
            "current_device": lambda: torch.device("cpu"),
            "Event": Event,
            **_nothings("current_stream", "Stream", "stream", "synchronize", "set_device"),
        },
        torch.cuda.profiler: _nothings("start", "stop"),
        torch.cuda.nvtx: _nothings("range"),
    }
    with contextlib.ExitStack() as stack:
        for module, names in replaced.items():
            for name, value in names.items():
                stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(OnCpu())
        yield


def _nothings(*names: str) -> dict[str, type[_Nothing]]:
    """Return a class for each name, as TorchDynamo wants no two names of an object."""
    return {name: type(name, (_Nothing,), {}) for name in names}


def _of_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


def fork(function: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1) -> None:
    """Start processes that have these replacements, too."""
    start: Any = vars(torch.multiprocessing)["start_processes"]
    start(function, args, nprocs, start_method="fork")
