"""Device that does nothing, for the time that calls take on the host: streams, events, kernels, peer-visible memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, cast

import numba
import torch

from fusco.api.communicator import Communicator
from fusco.api.create import CommunicatorParts
from fusco.api.validation import Validator
from fusco.control.bootstrap import PeerInfo
from fusco.control.connect import connect
from fusco.control.flags import load_acquire_at, store_release_at
from fusco.control.layout import SegmentSizes
from fusco.control.machine_calls import address_of
from fusco.control.member_gather import Gather
from fusco.control.session import Session
from fusco.core.access import Access
from fusco.core.config import Capacity, EngineConfig, Settings
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.cuda.between_nodes.nccl import Message
from fusco.cuda.engine import CudaEngine
from fusco.cuda.gpu import Gpu
from fusco.cuda.kernels.comm import Report
from fusco.cuda.kernels.library import Kernel
from fusco.cuda.kernels.plan import plan_type
from fusco.cuda.kernels.plan_forwarding import ForwardingArgs
from fusco.cuda.kernels.program import NativeCall
from fusco.cuda.tuning import SPIN_S
from fusco.planner.balancer import balance_by_lanes

_CPU = torch.device("cpu")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


class NullStream:
    """Stream on which everything is done at once."""

    cuda_stream, device = 1, _CPU

    def wait_event(self, event: object) -> None:
        """Do nothing."""

    wait_stream = wait_event

    def record_event(self) -> NullEvent:
        """Return an event that has been reached."""
        return NullEvent()


class NullEvent:
    """Event that has always been reached."""

    device: torch.device | None = None
    cuda_event = 1

    def record(self, stream: object = None) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True."""
        return True


class NullGpu(Gpu):
    """GPU that does nothing and has the memory of the host; ``stream`` is always the current one."""

    new_event: Any = NullEvent
    is_capturing = staticmethod(lambda: False)
    current_handle = staticmethod(lambda _: NullStream.cuda_stream)

    def __init__(self, device: torch.device = _CPU) -> None:
        super().__init__(device)
        self.stream: Any = NullStream()
        self.current_index = lambda: device.index

    def new_stream(self, *_: object, **__: object) -> Any:
        """Return another stream."""
        return NullStream()

    def current_stream(self) -> Any:
        """Return the only current stream."""
        return self.stream

    def entered(self) -> AbstractContextManager[object]:
        """Return a context that changes nothing."""
        return nullcontext()

    def on(self, *_: object) -> AbstractContextManager[object]:
        """Return a context that changes nothing."""
        return nullcontext()

    def enter_thread(self) -> None:
        """Do nothing."""

    def post_after_graph(self, semaphore: int) -> None:
        """Do nothing: no graph ends."""

    def collect_garbage(self) -> None:
        """Do nothing: nobody captures."""

    synchronize = enter_thread

    def allocate_visible(self, num_bytes: int) -> torch.Tensor:
        """Return host memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=_CPU)

    def share(self, memory: torch.Tensor, _store_gather: Gather, ranks: Sequence[int], _name: str) -> Any:
        """Return this rank's memory as that of all ranks."""
        return SharedMemory([memory] * len(ranks))

    def connect(self, *_: object) -> Any:
        """Return an NCCL that moves nothing."""
        return _NullNccl()


@dataclass(frozen=True)
class SharedMemory:
    """Memory of each rank of a node, as the handles of PyTorch's symmetric memory have it."""

    memories: Sequence[torch.Tensor]

    @property
    def buffer_ptrs(self) -> list[int]:
        """The addresses."""
        return [memory.data_ptr() for memory in self.memories]

    def get_buffer(self, rank: int, size: tuple[int, ...], _dtype: torch.dtype) -> torch.Tensor:
        """Return the first bytes of a rank's memory."""
        return self.memories[rank][: size[0]]


class _NullKernel(Kernel):
    """Kernel whose launch by the driver is a call of a compiled function."""

    def __init__(self, name: str, function: int, launch: Any) -> None:
        self._set_up(name, function, launch)
        self._shared_bytes = 1 << 30  # never asks the driver for more


class NullLibrary:
    """Library of kernels that do nothing but report what the host waits for.

    A plan needs ``num_slots`` rows, every token has an expert on every node, and rows are undefined.
    """

    device, num_sms, max_shared_bytes = _CPU, 132, 200 << 10

    def __init__(self, topology: Topology, num_slots: int, num_topk: int) -> None:
        self._launch = _null_launch(topology.ranks_per_node, topology.num_nodes)
        self._functions = {"plan": num_slots, "plan_forwarding": -num_topk}
        self._kernels: dict[tuple[object, ...], _NullKernel] = {}

    def address_of(self, _function: str) -> int:
        """See ``Library``."""
        return _null_call()

    def get(self, name: str, constants: Mapping[str, object]) -> _NullKernel:
        """See ``Library``."""
        key = (name, *constants.items())
        if key not in self._kernels:
            self._kernels[key] = _NullKernel(name, self._functions.get(name, 0), self._launch)
        return self._kernels[key]


@lru_cache(maxsize=1)
def _null_launch(ranks_per_node: int, num_nodes: int) -> Any:
    """Return a function with the arguments of ``cuLaunchKernelEx``.

    ``function`` is the size of a plan, the negative number of experts per token for ``plan_forwarding``, or 0.
    """
    args = plan_type(ranks_per_node, num_nodes)
    report_at, ticket_at = args.report.offset, args.ticket.offset
    assert (Report.ticket.offset, Report.num_slots.offset) == (0, 4), "one word of 8 bytes"
    of = {name: getattr(ForwardingArgs, name).offset for name in ("summary", "num_tokens", "num_nodes", "ticket")}
    summary_at, num_tokens_at, num_nodes_at, number_at = of.values()

    @numba.njit("int64(int64, int64)", inline="always")
    def uint32_at(address: int, offset: int) -> int:
        aligned = offset // 8 * 8
        return (load_acquire_at(address + aligned) >> (8 * (offset - aligned))) & 0xFFFFFFFF

    @numba.cfunc("int32(uint64, int64, int64, uint64)")
    def launch(_config: int, function: int, parameters: int, _extra: int) -> int:
        if not function:
            return 0
        arguments: int = load_acquire_at(parameters)
        if function > 0:
            ticket = load_acquire_at(arguments + ticket_at)
            if ticket:
                store_release_at(load_acquire_at(arguments + report_at), ticket | function << 32)
            return 0
        ticket = uint32_at(arguments, number_at)
        if ticket:
            summary, num_tokens = load_acquire_at(arguments + summary_at), uint32_at(arguments, num_tokens_at)
            own_node = uint32_at(arguments, num_nodes_at + 4)
            for node in range(uint32_at(arguments, num_nodes_at)):
                count = num_tokens * -function if node == own_node else num_tokens
                store_release_at(summary + 8 * node, count | ticket << 32)
        return 0

    return _called(launch, 4)


def _called(compiled: Any, num_arguments: int) -> Any:
    """Return a compiled function as one of ``ctypes``."""
    assert compiled.address is not None
    called = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * num_arguments)(compiled.address)
    called.compiled = compiled  # type: ignore[attr-defined]  # which must live as long
    return called


def _never(result: int) -> None:
    raise AssertionError(result)


@cache
def _null_function() -> Any:
    """Return a function that does nothing and returns 0."""

    @numba.cfunc("int32(int64, int64, int64, int64, int64, int64)")
    def do_nothing(_a: int, _b: int, _c: int, _d: int, _e: int, _f: int) -> int:
        return 0

    return _called(do_nothing, 6)


def _null_call() -> int:
    return address_of(_null_function())


class _NullNccl:
    """NCCL that moves nothing."""

    failure = ""

    def exchange(self, sends: object, receives: object, stream: int) -> None:
        """Do nothing."""

    def calls(self, sends: Sequence[Message], receives: Sequence[Message], _stream: int) -> list[NativeCall]:
        """Return as many calls as those of NCCL are."""
        addresses = [0, *(message.address for message in (*sends, *receives)), 0]
        return [NativeCall(_null_call(), (address,), _never) for address in addresses]

    def launch(self, call: Callable[[], int]) -> int:
        """Return the call's result."""
        return call()

    def abort(self) -> None:
        """Do nothing."""

    finish = abort


class NullDeviceValidator(Validator):
    """Validator for CUDA that takes the tensors of the CPU that play those of a device."""

    is_capturing = False

    def _tensor(self, name: str, tensor: torch.Tensor) -> None:
        pass


def keep_freed_memory() -> None:
    """Make the C library keep what is freed, as a device's allocator does: for this process, and where it is glibc.

    Otherwise large outputs are returned to the kernel and fetched again in each call, in some processes and not in
    others: a microsecond or two, which a rank that waits for another spends twice.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for option, num_bytes in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 1 << 30)):
            mallopt(option, num_bytes)


def null_communicator(
    store_gather: Gather,
    topology: Topology,
    num_experts: int,
    capacity: Capacity,
    library: NullLibrary,
    gpu: NullGpu | None = None,
) -> Communicator:
    """Return a communicator of all ranks.

    Everything on the host is real: validation, records, watchdog, plans, launches up to the driver and up to NCCL.
    """
    num_ranks, timeout_s = store_gather.world_size, store_gather.timeout_s
    placement = ExpertPlacement.of(num_experts, None, num_ranks)
    slice_bytes = 1 << (12 if topology.num_nodes == 1 else 24)  # little memory, or one slice
    config = EngineConfig(topology, capacity, Settings(timeout_s=timeout_s, slice_bytes=slice_bytes))
    peer_info = PeerInfo(["this machine"] * num_ranks, [], "127.0.0.1")
    connections = connect(store_gather, SegmentSizes.of_control(topology), peer_info, SPIN_S)
    engine = CudaEngine(connections, config, placement, cast("Any", library), gpu or NullGpu())
    session = Session(store_gather.rank, connections, Access("a benchmark's communicator"), on_broken=engine.abort)
    validator = NullDeviceValidator(
        rank=store_gather.rank,
        placement=placement,
        balancer=balance_by_lanes,
        capacity=capacity,
        wire_dtype=None,
        device=torch.device("cuda", 0),
    )
    return Communicator.of_parts(CommunicatorParts(session, engine, validator))
