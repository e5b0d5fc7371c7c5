"""Repeated calls return what others return, bit for bit, and leave every error as it is.

Ranks are threads, and kernels their twins. All else is real, up to the driver's function.
"""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace
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
)
from fusco.bench.null_device import NullLibrary, null_communicator, null_device
from fusco.cuda.kernels.library import Kernel
from fusco.cuda.repeated_calls import RepeatedCombine, RepeatedDispatch
from store_gathers import on_ranks

NUM_RANKS, NUM_EXPERTS, NUM_TOPK, MAX_TOKENS, HIDDEN = 2, 6, 2, 8, 16
CAPACITY = Capacity(num_topk=NUM_TOPK, max_tokens_per_rank=MAX_TOKENS, max_bytes_per_token=80)
TOPOLOGY = Topology.of_equal_nodes(NUM_RANKS, NUM_RANKS)
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
    """Communicators of the ranks of a node; each rank has one that repeats calls, and one that never does."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._words, self._limit_s = [NodeWords(NUM_RANKS) for _ in range(2)], limit_s

    def run(self, program, num_ranks: int = NUM_RANKS) -> dict:
        def on_rank(store_gather):
            store = store_gather.store
            libraries = [TwinLibrary(words) for words in self._words]
            comms = []
            for number, library in enumerate(libraries, 1):
                store_gather.store = dist.PrefixStore(str(number), store)
                comms.append(null_communicator(store_gather, TOPOLOGY, NUM_EXPERTS, CAPACITY, library))
            comms[1]._repeats = mock.Mock(dispatch=lambda *_: None, combine=lambda *_: None)
            try:
                return program(*comms, libraries[0])
            finally:
                for comm in comms:
                    comm.abort()

        def mapped(memory, store_gather, _ranks, name):
            addresses = store_gather.all_gather(name, memory.data_ptr())
            return SimpleNamespace(buffer_ptrs=addresses, get_buffer=lambda *_: memory)

        with null_device(), mock.patch("fusco.cuda.arena.rendezvous", mapped):
            results = on_ranks(num_ranks, on_rank, timeout_s=self._limit_s)
        for result in results.values():
            if isinstance(result, Exception):
                raise result
        return results


@pytest.fixture
def repeats():
    """Number of calls that were repeated, by kind."""
    with (
        mock.patch.object(RepeatedDispatch, "run", autospec=True, side_effect=RepeatedDispatch.run) as dispatches,
        mock.patch.object(RepeatedCombine, "run", autospec=True, side_effect=RepeatedCombine.run) as combines,
    ):
        yield lambda: (dispatches.call_count, combines.call_count)


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
            for name in ("intranode", "repeated_calls"):
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


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_rejected_input_is_told_to_ranks_that_repeat(rank, repeats):
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

    Node().run(program)
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


def test_a_late_rank_is_waited_for_and_a_dead_one_is_not(repeats):
    def program(comm, other, _library):
        for step in range(6):
            time.sleep(0.01 * (step % 2 == comm.rank))
            assert same(pair(comm, step), pair(other, step))
        if comm.rank:
            return None
        with pytest.raises(PeerFailureError, match=r"dispatch #13.*records of node 0") as raised:
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

    Node(limit_s=2.0).run(on_its_own)
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
