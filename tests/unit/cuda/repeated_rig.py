"""Ranks as threads and kernels as their twins, to compare repeated calls with others: all else is real.

It goes up to the driver's functions and NCCL's. Kernels that choose owners and move experts are emulated.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from emulator import EmulatorOfThreads
from simulated_kernels import NodeWords, SimulatedKernel

from fusco import Capacity, StaticRows, Topology
from fusco.bench.host.null_device import NullGpu, NullLibrary, null_communicator
from fusco.cuda.between_nodes.nccl import NcclTransport
from fusco.cuda.kernels.copy_experts import copied_bytes
from fusco.cuda.kernels.library import Kernel, _Config
from store_gathers import on_ranks

NUM_RANKS, NUM_EXPERTS, NUM_TOPK, MAX_TOKENS, HIDDEN = 2, 6, 2, 8, 16
CAPACITY = Capacity(num_topk=NUM_TOPK, max_tokens_per_rank=MAX_TOKENS, max_bytes_per_token=80)
TOPOLOGY, NODES = Topology.of_equal_nodes(NUM_RANKS, NUM_RANKS), Topology.of_equal_nodes(2, 1)
LIMIT_S = 20.0


class Stream:
    """Replaces a stream: what is launched is done before the launch returns."""

    def launch(self, what, act, is_ready=lambda: True) -> None:
        give_up = time.monotonic() + LIMIT_S
        while not is_ready():
            assert time.monotonic() < give_up, what
            time.sleep(1e-4)
        act()


def at(address, dtype, shape):
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if not num_bytes:
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=dtype).view(*shape)


EMULATED = {"share_counts", "exchange_rows", "copy_experts", "divide_rows", "plan_batch", "choose_owners"}
MACHINE = SimpleNamespace(at=at, stream_of=lambda _: Stream())


class TwinLibrary(NullLibrary):
    """Library of twins, which the driver's function calls with the arguments that it is given."""

    def __init__(self, words: NodeWords, emulator: EmulatorOfThreads | None) -> None:
        self._words, self._emulator, self._twins, self._kernels = words, emulator, [], {}
        self._launch = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(self._call)
        self.fails = False

    def _call(self, config, number, parameters, _extra) -> int:
        if self.fails:
            return 1
        twin, struct = self._twins[number - 1]
        address = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]
        shape = _Config.from_address(config)
        twin.launch(
            struct.from_address(address), 1, grid=shape.grid[0], num_threads=32, shared_bytes=shape.shared_bytes
        )
        return 0

    def get(self, name, constants):
        key = (name, *constants.items())
        if key not in self._kernels:
            emulated = self._emulator.kernel(name, constants, LIMIT_S) if name in EMULATED else None
            self._kernels[key] = TwinKernel(self, emulated or SimulatedKernel(MACHINE, self._words, name, constants))
        return self._kernels[key]


class TwinKernel(Kernel):
    """Kernel that its library finds by the number of its function."""

    def __init__(self, library: TwinLibrary, twin: SimulatedKernel) -> None:
        self._library, self._twin = library, twin
        self._set_up(twin.name, 0, library._launch)
        self._shared_bytes = 1 << 30

    def bind(self, arguments, stream, **shape):
        self._note(arguments)
        return super().bind(arguments, stream, **shape)

    def launch(self, arguments, stream, **shape):
        self._note(arguments)
        super().launch(arguments, stream, **shape)

    def _note(self, arguments) -> None:
        """Give the kernel a function of its own at its first launch, when its struct is known."""
        if not self.function:
            self._library._twins.append((self._twin, type(arguments)))
            self.function = len(self._library._twins)


class Node:
    """Communicators of the ranks of some nodes; each rank has one that repeats calls, and one that never does."""

    def __init__(self, limit_s: float = LIMIT_S, topology: Topology = TOPOLOGY, folder: Path | None = None) -> None:
        """``folder`` has what is compiled of emulated kernels."""
        num_nodes, num_ranks = topology.num_nodes, topology.ranks_per_node
        self._words, self._limit_s = [[NodeWords(num_ranks) for _ in range(num_nodes)] for _ in range(2)], limit_s
        self.topology, self._emulator = topology, EmulatorOfThreads(folder) if folder else None

    def run(self, program) -> dict:
        def on_rank(store_gather):
            store, node = store_gather.store, self.topology.rank_to_node[store_gather.rank]
            libraries = [TwinLibrary(words[node], self._emulator) for words in self._words]
            comms = []
            for number, library in enumerate(libraries, 1):
                store_gather.store = dist.PrefixStore(str(number), store)
                comms.append(null_communicator(store_gather, self.topology, NUM_EXPERTS, CAPACITY, library, TwinGpu()))
            comms[1]._repeats._is_enabled = False
            try:
                return program(*comms, libraries[0])
            finally:
                for comm in comms:
                    comm.abort()

        with mock.patch.object(TwinNccl, "queues", {}):
            results = on_ranks(self.topology.world_size, on_rank, timeout_s=self._limit_s)
        for result in results.values():
            if isinstance(result, Exception):
                raise result
        return results


class TwinGpu(NullGpu):
    """Devices of threads, which have the memory of the others."""

    def allocate_visible(self, num_bytes):
        """With room for experts in places, which tests give the engine once it is made."""
        return super().allocate_visible(num_bytes + copied_bytes(NUM_RANKS))

    def share(self, memory, store_gather, ranks, name):
        gathered = store_gather.all_gather(name, memory.data_ptr())
        addresses = [gathered[rank] for rank in ranks]
        return SimpleNamespace(
            buffer_ptrs=addresses, get_buffer=lambda index, size, dtype: at(addresses[index], dtype, size)
        )

    def connect(self, store_gather, *_):
        return TwinNccl(store_gather)


class TwinNccl(NcclTransport):
    """NCCL whose messages are copied when a group ends; its functions are called by their addresses, too."""

    queues: ClassVar[dict] = {}
    failure = ""

    def __init__(self, store_gather) -> None:
        self._rank, self._lock, self._is_open = store_gather.rank, threading.Lock(), True
        self._comm = ctypes.c_void_p(7)
        self._name = store_gather.all_gather("twin of NCCL", id(self))[0]
        self._group, self.fails_at = [], None
        kinds = {"ncclSend": 6, "ncclRecv": 6, "ncclGroupStart": 0, "ncclGroupEnd": 0}
        self._nccl = SimpleNamespace(
            **{
                name: ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * arguments)(partial(self._do, name))
                for name, arguments in kinds.items()
            },
            ncclGetLastError=lambda _: b"",
            ncclGetErrorString=lambda result: b"error %d" % result,
        )

    def _do(self, name, address=0, num_bytes=0, _type=0, peer=0, comm=7, _stream=0) -> int:
        assert comm == 7 or comm is self._comm
        if name == self.fails_at:
            return 3
        if name == "ncclSend":
            self._queue(self._rank, peer).put(ctypes.string_at(address, num_bytes))
        elif name == "ncclRecv":
            self._group.append((peer, address, num_bytes))
        elif name == "ncclGroupEnd":
            group, self._group = self._group, []
            for src, to, expected in group:
                sent = self._queue(src, self._rank).get(timeout=LIMIT_S)
                assert len(sent) == expected
                ctypes.memmove(to, sent, expected)
        return 0

    def _queue(self, src, dst) -> queue.SimpleQueue:
        return self.queues.setdefault((self._name, src, dst), queue.SimpleQueue())

    def _launch(self, sends, receives, stream) -> None:
        for name, messages in (("ncclSend", sends), ("ncclRecv", receives)):
            for message in messages:
                self._do(name, message.address, message.num_bytes, 0, message.peer)
        self._do("ncclGroupEnd")

    def abort(self) -> None:
        self._is_open = False

    finish = abort


def inputs(rank, step, num_tokens=MAX_TOKENS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    ids = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(NUM_TOPK).indices
    ids[torch.rand(num_tokens, NUM_TOPK, generator=generator) < 0.3] = -1
    return x, ids, torch.rand(num_tokens, NUM_TOPK, generator=generator)


def same(one, other) -> bool:
    sent, out = one
    expected, sums = other
    tensors = [*sent.payloads, sent.num_rows_per_expert, sent.num_rows_needed, out]
    others = [*expected.payloads, expected.num_rows_per_expert, expected.num_rows_needed, sums]
    on_host = sent.num_rows_per_expert_on_host
    is_exact = on_host is not None and torch.equal(on_host, sent.num_rows_per_expert)
    has_host_counts = expected.num_rows_per_expert_on_host is not None
    return all(map(torch.equal, tensors, others)) and is_exact == has_host_counts


CASES = {
    "exact": {},
    "static": {"static": StaticRows(NUM_RANKS * MAX_TOKENS * NUM_TOPK)},
    "masked": {"static": StaticRows(rows_per_expert=4, on_overflow="drop")},
    "aligned": {"expert_alignment": 4},
    "no weights": {"has_weights": False},
    "two payloads": {"has_scales": True},
    "bfloat16": {"dtype": torch.bfloat16},
}


def is_undefined(sent) -> torch.Tensor:
    """True for the rows that a dispatch leaves undefined, in their shape; blocks are not padded."""
    counts, shape = sent.num_rows_per_expert, sent.handle.rows_shape
    if sent.num_rows_per_expert_on_host is not None:
        return torch.zeros(shape, dtype=torch.bool)
    if len(shape) == 1:
        return torch.arange(shape[0]) >= counts.sum()
    return torch.arange(shape[1]) >= counts[:, None]


def pair(comm, step, *, has_weights=True, has_scales=False, dtype=torch.float32, num_tokens=MAX_TOKENS, **options):
    x, ids, weights = inputs(comm.rank, step, num_tokens, dtype)
    payloads = [x, x[:, :3].contiguous()] if has_scales else x
    sent = comm.dispatch(payloads, ids, weights if has_weights else None, **options)
    for payload in sent.payloads:
        payload[is_undefined(sent)] = 0
    return sent, comm.combine(sent.rows * 2, sent.handle)
