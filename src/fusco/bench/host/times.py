"""Time that a dispatch and a combine take on the host, and which steps take it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeAlias, TypeVar
from unittest import mock

import torch
import torch.distributed as dist

from fusco.api.communicator import Communicator
from fusco.api.handle import Dispatched
from fusco.api.validation import Validator
from fusco.bench.harness.environment import Measurement, hardware
from fusco.bench.host.null_device import NullLibrary, keep_freed_memory, null_communicator
from fusco.control.session import Session
from fusco.control.store_gather import StoreGather
from fusco.core.access import Access
from fusco.core.config import Capacity, StaticRows
from fusco.core.topology import Topology
from fusco.cuda.between_nodes.network import Network
from fusco.cuda.between_nodes.shuffle import InternodeShuffle
from fusco.cuda.engine import CudaEngine
from fusco.cuda.kernels.library import Kernel
from fusco.cuda.kernels.plan import PlanMemory
from fusco.cuda.kernels.plan_forwarding import ForwardingMemory
from fusco.cuda.kernels.program import Program
from fusco.cuda.repeated_calls import RepeatedAlongPlan, RepeatedDispatch
from fusco.cuda.stream_order import StreamOrder
from fusco.cuda.within_node.own_rows import OwnRows
from fusco.cuda.within_node.planning import DevicePlanner

VARIANTS = ("exact", "static")
_NUM_ROUNDS = 7  # the median one counts
_TIMEOUT_S = 20.0
_Result = TypeVar("_Result")
_Caller: TypeAlias = Callable[[int], tuple[float, float]]

# Steps in the order of a table, and the functions whose time each has, without that of other steps inside.
STEPS: Mapping[str, tuple[tuple[type, str], ...]] = {
    "validate": ((Validator, "known_dispatch"), (Validator, "known_combine"), (Validator, "validate_dispatch")),
    "enter and leave": (
        *((Access, name) for name in ("enter", "leave")),
        *((Session, name) for name in ("begin", "leave", "leave_repeated")),
    ),
    "records": ((Session, "repeat"), (Session, "agree")),
    "allocate": (
        *((RepeatedDispatch, "outputs"), (RepeatedAlongPlan, "outputs")),
        *((PlanMemory, "take"), (ForwardingMemory, "take")),
    ),
    "launch, wait for the plan": ((Program, "launch"), (Program, "wait")),
    # Of calls that are not repeated.
    "prepare": ((CudaEngine, "prepare_dispatch"), (CudaEngine, "prepare_combine")),
    "order streams": ((StreamOrder, "enter"), (StreamOrder, "hand_over")),
    "plan": ((DevicePlanner, "new_plan"), (DevicePlanner, "launch")),
    "wait for the plan": ((DevicePlanner, "size_exactly"), (DevicePlanner, "rejection_of")),
    "scatter": ((OwnRows, "scatter"),),
    "rows for each node": ((InternodeShuffle, "prepare_dispatch"),),
    "dispatch between nodes": ((InternodeShuffle, "_dispatch"),),
    "sums between nodes": ((InternodeShuffle, "combine"),),
    "network": ((Network, "exchange"),),
    "launch kernels": ((Kernel, "launch"),),
}
REST = "rest"


@dataclass(frozen=True, kw_only=True)
class HostRun:
    """Configuration of a measurement; ``device`` is ``"null"`` (stand-ins) or ``"cuda"``."""

    device: str
    num_ranks: int
    ranks_per_node: int
    num_tokens: int
    hidden: int
    num_experts: int
    num_topk: int
    num_calls: int


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    """One rank's times of a variant, in us: of a dispatch, its combine and both, with the steps of both.

    Also of a ``dispatch_again`` and a ``combine_all`` along a handle, the latter of rows and a weight for each k.
    """

    variant: str
    pair_us: float
    dispatch_us: float
    combine_us: float
    dispatch_again_us: float
    combine_all_us: float
    step_us: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class HostRecord(HostTimes, HostRun, Measurement):
    """Times of one variant on the slowest rank."""


class _Steps:
    """Seconds of each step, without those of steps inside it."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STEPS, 0.0)
        self._since, self._under_way = 0.0, [REST]
        self.seconds[REST] = 0.0

    def of(self, call: Callable[[int], object], num_calls: int) -> dict[str, float]:
        """Return the us of each step in a number of calls."""
        call(num_calls)
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self._since = time.perf_counter()
        call(num_calls)
        self._change()
        return {step: round(seconds / num_calls * 1e6, 1) for step, seconds in self.seconds.items()}

    def _change(self) -> None:
        now = time.perf_counter()
        self.seconds[self._under_way[-1]] += now - self._since
        self._since = now

    def timed(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed as a step."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._change()
            self._under_way.append(step)
            try:
                return function(*args, **kwargs)
            finally:
                self._change()
                self._under_way.pop()

        return call

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Time all steps inside."""
        with ExitStack() as stack:
            for step, functions in STEPS.items():
                for owner, name in functions:
                    timed = self.timed(step, getattr(owner, name))
                    stack.enter_context(mock.patch.object(owner, name, timed))
            yield


def measure_host(group: dist.ProcessGroup, run: HostRun, _progress_port: int | None = None) -> list[HostTimes]:
    """Return this rank's times of each variant; ranks are pinned to a core each where there are enough."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if run.device == "null" and len(cores) >= run.num_ranks:
        os.sched_setaffinity(0, {cores[group.rank()]})
    if run.device == "null":
        keep_freed_memory()
    try:
        with _communicator(group, run) as comm:
            times = [_time(comm, run, variant) for variant in VARIANTS]
        steps = _Steps()
        with steps.installed(), _communicator(group, run) as comm:  # launches keep the functions that they call
            step_us = [steps.of(_callers(comm, run, variant)[0], run.num_calls) for variant in VARIANTS]
    finally:
        os.sched_setaffinity(0, cores)
    return [HostTimes(**of, step_us=us) for of, us in zip(times, step_us, strict=True)]


def _communicator(group: dist.ProcessGroup, run: HostRun) -> Communicator:
    sizes: dict[str, Any] = {
        "num_topk": run.num_topk,
        "max_tokens_per_rank": run.num_tokens,
        "max_bytes_per_token": 2 * run.hidden,
    }
    if run.device == "cuda":
        sizes |= {"num_experts": run.num_experts, "ranks_per_node": run.ranks_per_node}
        return Communicator(group, device="cuda", **sizes)
    num_slots = run.num_tokens * run.num_topk
    topology = Topology.of_equal_nodes(run.num_ranks, run.ranks_per_node)
    library = NullLibrary(topology, num_slots, run.num_topk)
    return null_communicator(StoreGather(group, _TIMEOUT_S), topology, run.num_experts, Capacity(**sizes), library)


def _callers(comm: Communicator, run: HostRun, variant: str) -> tuple[_Caller, _Caller]:
    """Return functions that make a number of pairs, and of pairs along a handle.

    They return the seconds of all dispatches and of all combines.
    """
    device = "cuda" if run.device == "cuda" else "cpu"
    x = torch.ones(run.num_tokens, run.hidden, dtype=torch.bfloat16, device=device)
    # Each rank's tokens go to all ranks equally, and no expert twice.
    first = torch.arange(run.num_tokens, device=device)[:, None] + comm.rank
    stride = max(1, run.num_experts // run.num_topk)
    ids = (first + stride * torch.arange(run.num_topk, device=device)) % run.num_experts
    weights = torch.ones(run.num_tokens, run.num_topk, dtype=torch.float32, device=device)
    num_pairs = run.num_ranks * run.num_tokens * run.num_topk
    static = StaticRows(num_pairs) if variant == "static" else None
    handle = comm.dispatch(x, ids, weights, static=static).handle
    values = x.new_ones(handle.num_rows, run.num_topk, dtype=torch.float32)

    def dispatch() -> Dispatched:
        return comm.dispatch(x, ids, weights, static=static)

    def combine(sent: Dispatched) -> None:
        comm.combine(sent.rows, sent.handle)

    def dispatch_again() -> tuple[torch.Tensor, ...]:
        return comm.dispatch_again(x, handle)

    def combine_all(rows: tuple[torch.Tensor, ...]) -> None:
        comm.combine_all([*rows, values], handle)

    return partial(_spent, comm, dispatch, combine), partial(_spent, comm, dispatch_again, combine_all)


def _spent(
    comm: Communicator, first: Callable[[], _Result], second: Callable[[_Result], None], num_calls: int
) -> tuple[float, float]:
    """Return the seconds of a number of first and of second calls, which take what the first ones return."""
    first_s = second_s = 0.0
    for _ in range(num_calls):
        begin = time.perf_counter()
        result = first()
        middle = time.perf_counter()
        second(result)
        first_s += middle - begin
        second_s += time.perf_counter() - middle
    comm.synchronize()
    return first_s, second_s


def _time(comm: Communicator, run: HostRun, variant: str) -> dict[str, Any]:
    """Return the fields of ``HostTimes`` except those of steps: medians."""
    seconds: list[float] = []
    for call in _callers(comm, run, variant):
        call(run.num_calls)
        rounds = []
        for _ in range(_NUM_ROUNDS):
            begin = time.perf_counter()
            spent = call(run.num_calls)
            rounds.append((time.perf_counter() - begin, *spent))
        seconds += sorted(rounds)[_NUM_ROUNDS // 2]
    names = ("pair_us", "dispatch_us", "combine_us", "", "dispatch_again_us", "combine_all_us")
    us = {name: round(each / run.num_calls * 1e6, 1) for name, each in zip(names, seconds, strict=True) if name}
    return {"variant": variant, **us}


def records_of(run: HostRun, ranks: list[list[HostTimes]]) -> list[HostRecord]:
    """Return a record for each variant, of the rank with the longest pair."""
    slowest = [max(of_ranks, key=lambda times: times.pair_us) for of_ranks in zip(*ranks, strict=True)]
    return [HostRecord(**vars(run), **vars(times), hardware=hardware(run.device)) for times in slowest]
