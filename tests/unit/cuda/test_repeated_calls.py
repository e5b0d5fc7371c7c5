"""Repeated calls return what others return, bit for bit, and leave every error as it is.

Ranks are threads, and kernels their twins. All else is real, up to the driver's function.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from simulated_kernels import NodeWords, SimulatedKernel

from fusco import (
    Capacity,
    ClosedError,
    MismatchError,
    PeerFailureError,
    RejectedInputError,
    RowOverflowError,
    StaticRows,
    Topology,
    TransportError,
)
from fusco.bench.null_device import NullLibrary, null_communicator, null_device
from fusco.control.machine_calls import libc_address
from fusco.core.errors import Stall
from fusco.cuda.kernels.library import Kernel
from fusco.cuda.kernels.repeated_launches import NativeCall, RepeatedLaunches
from fusco.cuda.nccl import NcclTransport
from fusco.cuda.repeated_calls import RepeatedCombine, RepeatedDispatch
from fusco.cuda.repeated_internode import RepeatedInternodeCombine, RepeatedInternodeDispatch
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


MACHINE = SimpleNamespace(at=at, stream_of=lambda _: Stream())


class TwinLibrary(NullLibrary):
    """Library of twins, which the driver's function calls with the arguments that it is given."""

    def __init__(self, words: NodeWords) -> None:
        self._words, self._twins, self._kernels = words, [], {}
        self._launch = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(self._call)
        self.fails = False

    def _call(self, _config, number, parameters, _extra) -> int:
        if self.fails:
            return 1
        twin, struct = self._twins[number - 1]
        address = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]
        twin.launch(struct.from_address(address), 1, grid=1, num_threads=32)
        return 0

    def get(self, name, constants):
        key = (name, *constants.items())
        if key not in self._kernels:
            self._kernels[key] = TwinKernel(self, SimulatedKernel(MACHINE, self._words, name, constants))
        return self._kernels[key]


class TwinKernel(Kernel):
    """Kernel that its library finds by the number of its function."""

    def __init__(self, library: TwinLibrary, twin: SimulatedKernel) -> None:
        self._library, self._twin = library, twin
        self._set_up(twin._name, 0, library._launch)
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

    def __init__(self, limit_s: float = LIMIT_S, topology: Topology = TOPOLOGY) -> None:
        num_nodes, num_ranks = topology.num_nodes, topology.ranks_per_node
        self._words, self._limit_s = [[NodeWords(num_ranks) for _ in range(num_nodes)] for _ in range(2)], limit_s
        self.topology = topology

    def run(self, program) -> dict:
        def on_rank(store_gather):
            store, node = store_gather.store, self.topology.rank_to_node[store_gather.rank]
            libraries = [TwinLibrary(words[node]) for words in self._words]
            comms = []
            for number, library in enumerate(libraries, 1):
                store_gather.store = dist.PrefixStore(str(number), store)
                comms.append(null_communicator(store_gather, self.topology, NUM_EXPERTS, CAPACITY, library))
            comms[1]._repeats = mock.Mock(dispatch=lambda *_: None, combine=lambda *_: None)
            try:
                return program(*comms, libraries[0])
            finally:
                for comm in comms:
                    comm.abort()

        def mapped(memory, store_gather, ranks, name):
            addresses = store_gather.all_gather(name, memory.data_ptr())
            return SimpleNamespace(buffer_ptrs=[addresses[rank] for rank in ranks], get_buffer=lambda *_: memory)

        with (
            null_device(),
            mock.patch("fusco.cuda.arena.rendezvous", mapped),
            mock.patch("fusco.cuda.network.NcclTransport", TwinNccl),
            mock.patch.object(TwinNccl, "queues", {}),
        ):
            results = on_ranks(self.topology.world_size, on_rank, timeout_s=self._limit_s)
        for result in results.values():
            if isinstance(result, Exception):
                raise result
        return results


class TwinNccl(NcclTransport):
    """NCCL whose messages are copied when a group ends; its functions are called by their addresses, too."""

    queues: ClassVar[dict] = {}
    failure = ""

    def __init__(self, store_gather, *_, **__) -> None:
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


@pytest.fixture
def repeats():
    """Number of calls that were repeated, by kind."""
    with ExitStack() as stack:
        dispatches, combines = (
            [stack.enter_context(mock.patch.object(of, "run", autospec=True, side_effect=of.run)) for of in kinds]
            for kinds in ((RepeatedDispatch, RepeatedInternodeDispatch), (RepeatedCombine, RepeatedInternodeCombine))
        )
        yield lambda: tuple(sum(run.call_count for run in runs) for runs in (dispatches, combines))


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
    "aligned": {"expert_alignment": 4},
    "no weights": {"has_weights": False},
    "two payloads": {"has_scales": True},
    "bfloat16": {"dtype": torch.bfloat16},
}


def pair(comm, step, *, has_weights=True, has_scales=False, dtype=torch.float32, num_tokens=MAX_TOKENS, **options):
    x, ids, weights = inputs(comm.rank, step, num_tokens, dtype)
    payloads = [x, x[:, :3].contiguous()] if has_scales else x
    sent = comm.dispatch(payloads, ids, weights if has_weights else None, **options)
    if options.get("static"):  # the rest is undefined
        for payload in sent.payloads:
            payload[int(sent.num_rows_per_expert.sum()) :] = 0
    return sent, comm.combine(sent.rows * 2, sent.handle)


@pytest.fixture
def no_bound(request):
    """Without an output of the maximum size, if the test asks for that."""
    with ExitStack() as stack:
        if request.param:
            for name in ("intranode", "repeated_calls", "internode"):
                stack.enter_context(mock.patch(f"fusco.cuda.{name}.affordable_bound_of", return_value=None))
        yield


@pytest.mark.parametrize("no_bound", [False, True], indirect=True)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("no_bound")
def test_repeated_calls_return_what_others_do(case, repeats):
    def program(comm, other, _library):
        for step in range(6):
            made = [pair(each, step, **CASES[case]) for each in (comm, other)]
            assert same(*made), step
        assert comm.profile.operation == "combine #12"
        return comm.profile.num_sms

    assert set(Node().run(program).values()) == {132}
    # The first call is validated in full, the second is like it, and the third is prepared.
    assert repeats() == (2 * 3, 2 * 3)


@pytest.mark.parametrize("no_bound", [False, True], indirect=True)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("no_bound")
def test_repeated_calls_between_nodes_return_what_others_do(case, repeats):
    def program(comm, other, _library):
        for step in range(7):
            made = [pair(each, step, **CASES[case]) for each in (comm, other)]
            assert same(*made), step
        ours, theirs = comm.profile, other.profile
        for name in ("internode_row_bytes", "internode_empty_bytes", "internode_metadata_bytes", "num_sms"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.operation == "combine #14"
        x, (sent, _) = inputs(comm.rank, 9)[0], made[0]
        moved = [each.dispatch_again(x, of[0].handle)[0] for each, of in zip((comm, other), made, strict=True)]
        num_rows = int(sent.num_rows_per_expert.sum()) if case == "static" else len(sent.rows)
        assert torch.equal(*(rows[:num_rows] for rows in moved))

    Node(topology=NODES).run(program)
    # The rows of the first exact dispatch are counted, and so combine is like an earlier one only in the third.
    assert repeats() == (2 * 4, 2 * 4)


def test_static_rows_between_nodes_of_three_ranks_are_repeated(repeats):
    options = {"static": StaticRows(6 * MAX_TOKENS * NUM_TOPK)}

    def program(comm, other, _library):
        for step in range(5):
            assert same(*(pair(each, step, **options) for each in (comm, other))), step

    Node(topology=Topology.of_equal_nodes(6, 3)).run(program)
    assert repeats() == (6 * 2, 6 * 2)


def test_a_rank_whose_slices_are_copied_repeats_nothing_and_others_do(repeats):
    def program(comm, other, _library):
        for step in range(6):
            assert same(*(pair(each, step, num_tokens=4) for each in (comm, other))), step  # more are two slices

    Node(topology=Topology.of_equal_nodes(3, 1)).run(program)
    assert repeats() == (2 * 3, 2 * 3)  # the rows of ranks 0 and 2 do not follow each other


def test_rows_that_no_token_fills_are_counted_again_if_there_are_many(repeats):
    def program(comm, other, _library):
        for step in range(12):
            x, ids, weights = inputs(comm.rank, step)
            if step in (5, 6):  # no expert on another node
                ids = ids % 3 + 3 * comm.rank
            made = []
            for each in (comm, other):
                sent = each.dispatch(x, ids, weights)
                made.append((sent, each.combine(sent.rows, sent.handle)))
            assert same(*made), step
        return comm.profile.internode_empty_bytes

    with mock.patch("fusco.cuda.message_rows.MAX_EMPTY_BYTES", 6 * HIDDEN * 4):
        Node(topology=NODES).run(program)
    # In step 6, after one with many empty rows, rows are counted, and in step 7; steps 8 and 9 are the next that are
    # alike.
    assert 2 * 3 <= repeats()[0] < 2 * 8


@pytest.mark.parametrize("name", ["ncclSend", "ncclGroupEnd"])
def test_messages_that_nccl_refuses_end_the_communicator(name):
    def program(comm, _other, _library):
        for step in range(5):
            pair(comm, step)
        comm._engine._network._nccl.fails_at = name
        with pytest.raises((TransportError, PeerFailureError), match=r"NCCL failed in .*: error 3"):
            pair(comm, 5)
        with pytest.raises(Exception, match="cannot be used any more"):
            pair(comm, 6)

    Node(topology=NODES).run(program)


def test_messages_after_an_abort_of_nccl_are_an_error():
    def program(comm, _other, _library):
        for step in range(5):
            pair(comm, step)
        network = comm._engine._network
        stall = Stall("the network", (1 - comm.rank,), "slice 0", "nothing")
        network.nccl_watchdog._give_up(stall)
        comm._engine._arena._abort.value = 0  # as if it were aborted after the record was published
        with pytest.raises(PeerFailureError, match="slice 0"):
            pair(comm, 5)

    Node(topology=NODES, limit_s=5.0).run(program)


def test_results_outlive_later_calls(repeats):
    def program(comm, _other, _library):
        made = [pair(comm, step) for step in range(40)]
        for step, (sent, out) in enumerate(made):
            assert torch.equal(comm.combine(sent.rows * 2, sent.handle), out), step
        counts = [sent.num_rows_per_expert for sent, _ in made]
        assert len({each.data_ptr() for each in counts}) == len(counts)
        made[20][0].num_rows_per_expert.fill_(-1)  # a caller may
        assert (counts[19] >= 0).all()
        assert (counts[21] >= 0).all()

    Node().run(program)
    assert repeats()[0] == 2 * 37


def test_gradients_flow_through_repeated_calls(repeats):
    def program(comm, other, _library):
        def gradients(of, step):
            x, ids, weights = inputs(of.rank, step)
            x.requires_grad_()
            weights.requires_grad_()
            sent = of.dispatch(x, ids, weights)
            of.combine(sent.rows.sin(), sent.handle).square().sum().backward()
            return x.grad, weights.grad

        for step in range(5):
            assert all(map(torch.equal, gradients(comm, step), gradients(other, step)))

    Node().run(program)
    assert min(repeats()) > 0


def test_other_numbers_of_tokens_are_no_repetition(repeats):
    def program(comm, other, _library):
        for step, of_rank_1 in enumerate((8, 8, 8, 8, 5, 8, 0, 0, 0, 0)):
            num_tokens = of_rank_1 if comm.rank == 1 else MAX_TOKENS
            assert same(*(pair(each, step, num_tokens=num_tokens) for each in (comm, other))), step

    Node().run(program)
    dispatches, _ = repeats()
    assert 2 * 2 < dispatches < 2 * 7


@pytest.mark.parametrize("topology", [TOPOLOGY, NODES], ids=["a node", "two nodes"])
@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_rejected_input_is_told_to_ranks_that_repeat(rank, topology, repeats):
    def program(comm, other, _library):
        for step in range(4):
            pair(comm, step)
        x, ids, weights = inputs(comm.rank, 4)
        with pytest.raises(ValueError if comm.rank == rank else RejectedInputError, match="the routing 8 tokens"):
            comm.dispatch(x[:7] if comm.rank == rank else x, ids, weights)
        assert same(pair(comm, 5), pair(other, 5))
        ids[3, 1] = NUM_EXPERTS if comm.rank == rank else 0
        with pytest.raises(ValueError if comm.rank == rank else RejectedInputError, match=r"topk_idx\[3, 1\] = 6"):
            comm.dispatch(x, ids, weights)
        assert same(pair(comm, 6), pair(other, 6))

    Node(topology=topology).run(program)
    assert repeats()[0] == 2 * 4


def test_ranks_that_repeat_another_call_notice(repeats):
    def program(comm, other, _library):
        sent = [pair(comm, step)[0] for step in range(4)]
        mistaken = (lambda: comm.combine(sent[-1].rows, sent[-1].handle), lambda: pair(comm, 4))[comm.rank]
        with pytest.raises(MismatchError, match=r"combine on rank 0, dispatch on rank 1"):
            mistaken()
        with pytest.raises(MismatchError, match="handle is"):
            comm.combine(sent[comm.rank].rows, sent[comm.rank].handle)
        assert same(pair(comm, 5), pair(other, 5))

    Node().run(program)
    assert repeats() == (2 * 2, 2 * 2)


def test_an_overflow_is_raised_by_the_call_after_it():
    def program(comm, _other, _library):
        for step in range(4):
            pair(comm, step)
        comm._engine._arena.report.overflow_limit, comm._engine._arena.report.overflow_needed = 3, 4
        with pytest.raises((RowOverflowError, RejectedInputError), match=r"needed 4 expert-major rows"):
            pair(comm, 4)

    Node().run(program)


def test_an_overflow_of_messages_is_raised_by_the_call_after_it(repeats):
    static = StaticRows(NUM_RANKS * MAX_TOKENS * NUM_TOPK, max_rows_to_node=3)

    def program(comm, _other, _library):
        x, _, weights = inputs(comm.rank, 0)
        here, there = (torch.tensor([[3 * rank, 3 * rank + 1]] * MAX_TOKENS) for rank in (comm.rank, 1 - comm.rank))
        for ids in (here, here, here, here, there):
            comm.dispatch(x, ids, weights, static=static)
        with pytest.raises(RowOverflowError, match=str(MAX_TOKENS)):
            comm.dispatch(x, here, weights, static=static)

    Node(topology=NODES).run(program)
    assert repeats()[0] == 2 * 2


def test_the_call_that_fails_is_named_among_many():
    named = []
    calls = [
        NativeCall(
            libc_address("abs"), (13 * (number == 299),), lambda error, number=number: named.append((number, error))
        )
        for number in range(300)
    ]
    RepeatedLaunches(calls, 1, 0, 0).launch(0)
    assert named == [(299, 13)]


@pytest.mark.parametrize("topology", [TOPOLOGY, NODES], ids=["a node", "two nodes"])
def test_a_late_rank_is_waited_for_and_a_dead_one_is_not(topology, repeats):
    def program(comm, other, _library):
        for step in range(6):
            time.sleep(0.01 * (step % 2 == comm.rank))
            assert same(pair(comm, step), pair(other, step))
        if comm.rank:
            return None
        with pytest.raises(PeerFailureError, match=r"dispatch #13.*records of node \d") as raised:
            pair(comm, 6)
        return raised.value.peers

    results = {}
    over = threading.Event()

    def on_its_own(comm, other, library):
        try:
            results[comm.rank] = program(comm, other, library)
        finally:
            if comm.rank == 0:
                over.set()
            over.wait(LIMIT_S)
            comm._session.broken = other._session.broken = "the test is over"

    Node(limit_s=2.0, topology=topology).run(on_its_own)
    assert results == {0: (1,), 1: None}
    assert repeats() == (2 * 3, 2 * 3)


def test_a_kernel_that_cannot_be_launched_ends_the_communicator():
    def program(comm, _other, library):
        for step in range(4):
            pair(comm, step)
        library.fails = True
        with pytest.raises(RuntimeError, match="plan: 1"):
            pair(comm, 4)
        library.fails = False
        with pytest.raises(Exception, match="cannot be used any more"):
            pair(comm, 5)

    with mock.patch.object(Kernel, "error", lambda kernel, result: RuntimeError(f"{kernel.name}: {result}")):
        Node().run(program)


def test_addresses_that_kernels_cannot_use_are_no_repetition(repeats):
    def program(comm, other, _library):
        def misaligned(each, step):
            x, ids, weights = inputs(each.rank, step)
            memory = torch.empty(x.numel() + 1)
            sent = each.dispatch(memory[1:].view(x.shape).copy_(x), ids, weights)
            rows = torch.empty(sent.rows.numel() + 1)[1:].view(sent.rows.shape).copy_(sent.rows)
            return sent, each.combine(rows, sent.handle)

        for step in range(4):
            pair(comm, step)
        for step in range(3):
            assert same(misaligned(comm, step), misaligned(other, step))

    Node().run(program)
    assert repeats() == (2, 2)


def test_rows_that_are_contiguous_only_if_there_is_one_are_no_repetition(repeats):
    def program(comm, other, _library):
        def with_rows(each, num_rows):
            x = torch.arange(MAX_TOKENS * HIDDEN, dtype=torch.float32).view(MAX_TOKENS, HIDDEN)
            ids = torch.full((MAX_TOKENS, NUM_TOPK), -1)
            ids[:num_rows, 0] = each.rank * NUM_EXPERTS // NUM_RANKS
            sent = each.dispatch(x, ids)
            columns = torch.cat([sent.rows, -sent.rows], 1)[:, :HIDDEN]
            return sent, each.combine(columns, sent.handle)

        for num_rows in (1, 1, 1, 1, 5, 0, 5):
            assert same(*(with_rows(each, num_rows) for each in (comm, other))), num_rows

    Node().run(program)
    assert repeats() == (2 * 4, 2 * 2)


@pytest.mark.parametrize("verb", ["dispatch", "combine"])
def test_a_rank_without_memory_for_an_output_does_not_repeat(verb):
    new_empty, short = torch.Tensor.new_empty, threading.local()

    def without_memory(tensor, *shape):
        if getattr(short, "times", 0):
            short.times -= 1
            raise torch.OutOfMemoryError("no room")
        return new_empty(tensor, *shape)

    def program(comm, _other, _library):
        def call():
            return comm.dispatch(x, ids, weights).rows if verb == "dispatch" else comm.combine(rows, sent.handle)

        for step in range(4):
            sent, _ = pair(comm, step)
        (x, ids, weights), rows = inputs(comm.rank, 4), sent.rows * 2
        expected = call()
        short.times = 1 - comm.rank
        assert torch.equal(call(), expected)
        assert short.times == 0

    with mock.patch.object(torch.Tensor, "new_empty", without_memory):
        Node().run(program)


def test_tickets_wrap_around(repeats):
    def program(comm, other, _library):
        for each in (comm, other):
            each._engine._shuffle._planner._ticket = 2**32 - 4
        for step in range(6):
            assert same(pair(comm, step), pair(other, step)), step

    Node().run(program)
    assert repeats()[0] > 0


@pytest.mark.parametrize("is_repeated", [True, False])
def test_a_communicator_may_be_closed_by_a_signal_handler_while_it_waits(is_repeated):
    def program(comm, _other, _library):
        for step in range(4 if is_repeated else 1):
            pair(comm, step)
        if comm.rank:
            over.wait(LIMIT_S)
            return
        polls = iter(range(3))
        comm._session._watchdog.add_poll(lambda: next(polls, -1) == 2 and comm.abort() is not None)
        try:
            with pytest.raises(ClosedError, match="it is closed"):
                pair(comm, 4)
        finally:
            over.set()

    over = threading.Event()
    Node().run(program)


def test_a_call_that_is_interrupted_after_it_was_announced_ends_the_communicator():
    def program(comm, _other, _library):
        for step in range(4):
            pair(comm, step)
        x, ids, weights = inputs(comm.rank, 4)
        if comm.rank:  # its record is another one, so rank 0 does not repeat its call any more
            with pytest.raises(ValueError, match="the routing 8 tokens"):
                comm.dispatch(x[:7], ids, weights)
            return
        validator = comm._validator
        comm._validator = mock.Mock(validate_dispatch=mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            comm.dispatch(x, ids, weights)
        comm._validator = validator
        with pytest.raises(ClosedError, match="failed in dispatch: KeyboardInterrupt"):
            comm.dispatch(x, ids, weights)

    Node().run(program)


def test_an_alignment_that_makes_more_rows_than_kernels_count_is_refused():
    def program(comm, _other, _library):
        x, ids, weights = inputs(comm.rank, 0)
        few = 2**31 // 3  # for each of three experts
        with pytest.raises(ValueError, match=rf"expert_alignment={few} may pad this rank's rows to 2147483\d+, more"):
            comm.dispatch(x, ids, weights, expert_alignment=few)

    Node().run(program)
