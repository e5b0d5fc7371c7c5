"""Functions on ranks: calls captured in CUDA graphs, replayed with other inputs, compared with exactly sized calls."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from rank_setup import Setup

import fusco
from comparison import assert_same_bits
from generator import Case, any_bits, values

HIDDEN = 40
Outputs = tuple[list[torch.Tensor], torch.Tensor]  # outputs of all calls, and the rows of each local expert


def ids_of(case: Case, rank: int) -> torch.Tensor:
    """As the case says, or with holes, or with one expert for all pairs of a token, or with none: by its seed."""
    ids = case.topk_idx(rank)
    if case.seed % 4 == 1:
        ids[::2, ::2] = -1
    elif case.seed % 4 == 2:
        ids = ids[:, :1].expand(ids.shape)
    elif case.seed % 4 == 3:
        ids.fill_(-1)
    return ids


class Captured:
    """Inputs in place, and a graph: a dispatch, another along its routing, and a combine of twice the rows."""

    def __init__(
        self, comm: fusco.Communicator, case: Case, static: fusco.StaticRows, *, other_bytes: int = 12
    ) -> None:
        shape = (case.num_tokens(comm.rank), case.num_topk)
        self._comm = comm
        self._ids = torch.zeros(shape, dtype=torch.int64, device="cuda")
        self._weights = torch.zeros(shape, device="cuda")
        self._x = torch.zeros(shape[0], HIDDEN, dtype=torch.bfloat16, device="cuda")
        self._other = torch.zeros(shape[0], 12, dtype=torch.float8_e4m3fn, device="cuda")
        self.fill(case)
        self._run(static)  # compiles and loads the kernels and connects ranks, which a capture may not
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._made = self._run(static)

    def _run(self, static: fusco.StaticRows | None) -> Outputs:
        sent = self._comm.dispatch(self._x, self._ids, self._weights, static=static, with_weights=True)
        others = self._comm.dispatch_again(self._other, sent.handle)
        out = self._comm.combine(sent.rows * 2, sent.handle)
        return [sent.rows, others[0], sent.weights, out], sent.num_rows_per_expert

    def fill(self, case: Case) -> None:
        """Give it other inputs, in place."""
        rank = self._comm.rank
        self._x.copy_(values(self._x.shape, torch.bfloat16, case.seed, "x", rank))
        other = any_bits(self._other.shape, torch.uint8, case.seed, "other", rank)
        self._other.view(torch.uint8).copy_(other)
        self._ids.copy_(ids_of(case, rank))
        self._weights.copy_(case.topk_weights(rank))

    def replay(self) -> Outputs:
        """Return copies of what it gives, in the order of the stream."""
        for output in self._made[0]:
            output.view(-1).view(torch.uint8).fill_(0xFF)
        self._graph.replay()
        return [output.clone() for output in self._made[0]], self._made[1].clone()

    def run_exactly(self) -> Outputs:
        """Return the same without static rows and without a graph."""
        return self._run(None)


def assert_equal(replayed: Outputs, exact: Outputs) -> None:
    """Compare bit for bit; expert-major rows after the last block are undefined."""
    assert replayed[1].tolist() == exact[1].tolist()
    for name, ours, theirs in zip(("rows", "other rows", "weights", "sums"), replayed[0], exact[0], strict=True):
        if ours.ndim > theirs.ndim:  # masked: each expert's rows, without those behind them
            ours = ours[torch.arange(ours.shape[1], device=ours.device) < replayed[1][:, None]]  # noqa: PLW2901
        assert len(ours) >= len(theirs)
        assert_same_bits(ours[: len(theirs)].cpu(), theirs.cpu(), name)


def check_replays(group: dist.ProcessGroup, setup: Setup, kinds: list[str], *, is_masked: bool = False) -> None:
    """Replay a graph with several routings, one after the other without any wait, then compare all of them."""
    with setup.open(group) as on_device:
        comm = on_device._comm  # type: ignore[attr-defined]
        size = comm.topology.world_size
        cases = [setup.case(kind, seed, size, setup.num_topk) for seed, kind in enumerate(kinds)]
        num_pairs = size * setup.max_tokens * setup.num_topk
        most = fusco.StaticRows(rows_per_expert=num_pairs) if is_masked else fusco.StaticRows(num_pairs)
        captured = Captured(comm, cases[0], most)
        replayed = []
        for case in cases:
            captured.fill(case)
            replayed.append(captured.replay())
        for case, outputs in zip(cases, replayed, strict=True):
            captured.fill(case)
            assert_equal(outputs, captured.run_exactly())
            assert_equal(captured.replay(), captured.run_exactly())  # calls and replays take turns
        comm.synchronize()
        del captured


def check_overflows(group: dist.ProcessGroup, setup: Setup) -> None:
    """Replay with messages that are too small: an error of its rank, once, and all go on."""
    with setup.open(group) as on_device:
        comm = on_device._comm  # type: ignore[attr-defined]
        size, node = comm.topology.world_size, comm.topology.rank_to_node[comm.rank]
        fits, not_all = (setup.case("balanced", seed, size, setup.num_topk) for seed in (3, 4))
        limit = setup.max_tokens // 2
        most = size * setup.max_tokens * setup.num_topk
        captured = Captured(comm, fits, fusco.StaticRows(most, max_rows_to_node=limit))
        captured.replay()
        comm.synchronize()
        captured.fill(not_all)
        captured.replay()
        with pytest.raises(fusco.RowOverflowError) as raised:
            comm.synchronize()
        assert raised.value.node != node
        assert raised.value.num_rows == limit < raised.value.num_rows_needed <= setup.max_tokens
        captured.fill(fits)
        captured.replay()
        comm.synchronize()
        del captured


def replay_until_death(group: dist.ProcessGroup, setup: Setup, victim: int) -> tuple[tuple[int, ...], float, float]:
    """Replay until the victim, which kills itself, is named; return the named ranks, the time of that, and of closing.

    The graph lives as long as the communicator and longer.
    """
    on_device = setup.open(group)
    comm = on_device._comm  # type: ignore[attr-defined]
    size = comm.topology.world_size
    captured = Captured(comm, setup.case("balanced", 0, size, setup.num_topk), fusco.StaticRows(size * 1000))
    captured.replay()
    comm.synchronize()  # so all ranks have captured it
    if comm.rank == victim:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    named: tuple[int, ...] = ()
    began = time.monotonic()
    while not named and time.monotonic() < began + 60:
        captured.replay()
        try:
            comm.synchronize()
        except fusco.PeerFailureError as error:
            named = error.peers
    took_s = time.monotonic() - began
    captured.replay()
    torch.cuda.synchronize()
    began = time.monotonic()
    comm.close()
    return named, took_s, time.monotonic() - began


def _replay_until_named(comm: fusco.Communicator, captured: Captured, victim: int) -> tuple[int, ...]:
    """Replay until the victim, which kills itself, is named; return the named ranks."""
    captured.replay()
    comm.synchronize()  # so all ranks are here
    if comm.rank == victim:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        captured.replay()
        try:
            comm.synchronize()
        except fusco.PeerFailureError as error:
            return error.peers
    return ()


def replay_without_the_dead(
    group: dist.ProcessGroup, setup: Setup, victims: Sequence[int]
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Shrink after each death and compare replays of a graph from before with exact calls.

    Return the ranks that were named and that were gone each time, and the numbers of graphs that lived.
    """
    on_device = setup.open(group)
    comm = on_device._comm  # type: ignore[attr-defined]
    size = comm.topology.world_size
    most = fusco.StaticRows(size * setup.max_tokens * setup.num_topk)
    captured = Captured(comm, setup.case("balanced", 0, size, setup.num_topk), most)
    gone, num_live = [], [comm._engine.num_live_graphs()]
    for turn, victim in enumerate(victims):
        gone += [_replay_until_named(comm, captured, victim), comm.shrink()]
        for seed in range(8 * turn, 8 * turn + 4):
            captured.fill(setup.case("skewed", seed, size, setup.num_topk))
            replayed = captured.replay()
            assert_equal(replayed, captured.run_exactly())
            assert_equal(captured.replay(), captured.run_exactly())  # calls and replays take turns
        comm.check()
        num_live.append(comm._engine.num_live_graphs())
    comm.synchronize()
    del captured
    num_live.append(comm._engine.num_live_graphs(are_deleted=True))
    comm.close()
    return gone, num_live


def shrink_once_graphs_are_deleted(group: dist.ProcessGroup, setup: Setup, victim: int) -> tuple[int, ...]:
    """Shrink between nodes, which a graph that lives prevents; return the ranks that are gone."""
    on_device = setup.open(group)
    comm = on_device._comm  # type: ignore[attr-defined]
    size = comm.topology.world_size
    captured = Captured(comm, setup.case("balanced", 0, size, setup.num_topk), fusco.StaticRows(size * 1000))
    named = _replay_until_named(comm, captured, victim)
    assert named == (victim,)
    with pytest.raises(ValueError, match=r"shrink makes .* 1 CUDA graph.* delete them, call shrink again"):
        comm.shrink()
    del captured
    gone: tuple[int, ...] = comm.shrink()
    x, ids = torch.ones(4, HIDDEN, device="cuda"), torch.arange(4 * setup.num_topk, device="cuda").view(4, -1)
    sent = comm.dispatch(x, ids % setup.num_experts)
    sums = comm.combine(sent.rows, sent.handle)
    is_lost = torch.tensor([expert in comm.lost_experts for expert in range(setup.num_experts)])
    num_left = (~is_lost[(ids % setup.num_experts).cpu()]).sum(1)
    assert torch.equal(sums.cpu(), num_left[:, None].float().expand(sums.shape))
    comm.close()
    return gone
