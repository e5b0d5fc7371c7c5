"""The CUDA kernels themselves, under the code that launches them: on the CPU, in any order that they allow.

``test_internode`` runs the same scenes with the kernels' twins. Here every wait, flag, barrier and share of work is
the kernels' own. (On a GPU: ``tests/cuda`` and ``tests/multirank --device cuda``.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated_scenes import EPOCHS, Emulated, EmulatedPlay
from emulator import is_available
from scenes import PAYLOADS, Play, Scene
from simulated_nodes import Rank

from comparison import assert_same_bits
from fusco import Capacity, ExpertPlacement, Launch, Settings, StaticRows, Topology
from fusco.control.fingerprint import CollectiveFingerprint
from fusco.core.profile import Call, CallProfile
from fusco.cuda import tuning
from fusco.cuda.arena import Arena
from fusco.cuda.device_plan import DevicePlan
from fusco.cuda.failure import stall_of
from fusco.cuda.kernels import combine_rows as combine_kernel, plan as plan_kernel
from fusco.cuda.kernels.abi import MAX_PARTS
from fusco.cuda.kernels.copy_segments import copy_segments as copy_on_device
from fusco.cuda.kernels.weight_gradients import launch as launch_weight_gradients
from fusco.cuda.kernels.weighted_sum import weighted_sum as launch_weighted_sum
from fusco.cuda.layout import DeviceLayout
from fusco.engine.base import DispatchRequest
from fusco.planner.routing import Routing
from fusco.reference.copy_segments import copy_segments
from fusco.reference.weight_gradients import weight_gradients
from fusco.reference.weighted_sum import weighted_sum
from generator import KINDS, random_of

pytestmark = pytest.mark.skipif(not is_available, reason="needs a C++ compiler, g++ or clang++")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(autouse=True)
def as_many_blocks_as_for_many_tokens(monkeypatch):
    monkeypatch.setattr(plan_kernel, "plan_shape", lambda num_pairs: (512, -(-num_pairs // 8)))


def play(scene: Scene, folder, order: int = 0, **sizes: int) -> None:
    whole = EmulatedPlay(scene, folder, **sizes)
    whole.check(whole.run(order))


@pytest.mark.parametrize("kind", KINDS)
def test_within_a_node(kind, folder):
    for order, num_ranks in enumerate((1, 2, 3, 8)):
        play(Scene(num_nodes=1, ranks_per_node=num_ranks, kind=kind, seed=order), folder, order)


@pytest.mark.parametrize("kind", KINDS)
def test_between_nodes(kind, folder):
    for order, (num_nodes, ranks_per_node) in enumerate([(2, 2), (3, 1), (2, 3)]):
        play(Scene(num_nodes=num_nodes, ranks_per_node=ranks_per_node, kind=kind, seed=order), folder, order)


@pytest.mark.parametrize(
    "changes",
    [
        {"payloads": PAYLOADS[1], "is_in_place": True},
        {"payloads": PAYLOADS[2], "alignment": 4, "is_static": True},
        {"payloads": PAYLOADS[3], "is_weighted": False},
        {"dtype": torch.float64, "hidden": 1},
        {"dtype": torch.float16, "hidden": 8},
        {"dtype": torch.bfloat16, "wire_dtype": torch.float32, "hidden": 300},
        {"dtype": torch.float32, "hidden": 33, "is_in_place": True, "is_static": True},
        {"dtype": torch.float16, "wire_dtype": torch.float32, "alignment": 4, "is_in_place": True},
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(1, 4), (2, 2)])
def test_dtypes_widths_and_ways_to_have_rows(changes, num_nodes, ranks_per_node, folder):
    for order, kind in enumerate(("ragged with holes", "skewed")):
        scene = Scene(num_nodes=num_nodes, ranks_per_node=ranks_per_node, kind=kind, seed=4 + order, **changes)
        play(scene, folder, order)


def test_many_rows_for_each_warp(folder, monkeypatch):
    """Rows are not shared among warps then."""
    monkeypatch.setattr(tuning, "ROWS_FOR_ALL_WARPS", 1)
    for order in range(3):
        play(Scene(num_nodes=1, ranks_per_node=4, kind="balanced", seed=order), folder, order)


@pytest.mark.parametrize("kind", ["ragged with holes", "skewed"])
def test_a_plan_of_one_block_with_more_pairs_than_it_keeps(kind, folder, monkeypatch):
    monkeypatch.setattr(plan_kernel, "plan_shape", lambda _: (512, 1))
    for order in range(2):
        play(Scene(num_nodes=1, ranks_per_node=4, kind=kind, seed=order), folder, order)


@pytest.mark.parametrize("kind", ["balanced", "ragged with holes", "repeated experts"])
def test_sums_have_the_bits_of_the_twins(kind, folder):
    for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32, torch.float64)):
        scene = Scene(num_nodes=2, ranks_per_node=2, kind=kind, seed=seed, dtype=dtype, hidden=17)
        emulated, twins = EmulatedPlay(scene, folder).run(seed), Play(scene).run(seed)
        for rank, (ours, theirs) in enumerate(zip(emulated, twins, strict=True)):
            for one, other in zip(ours.sums, theirs.sums, strict=True):
                assert_same_bits(one, other, f"sums of rank {rank} in {dtype}")


@pytest.mark.parametrize("order", range(6))
def test_a_few_resident_blocks_of_a_grid_do_all_that_others_wait_for(folder, order, monkeypatch):
    """As with concurrent kernels that wait for other ranks: only one of combine's blocks is resident."""
    monkeypatch.setattr(combine_kernel, "combine_shape", lambda *_: tuning.RingShape(512, 3, 2, 3))
    play(Scene(num_nodes=1, ranks_per_node=3 + order % 2, kind="balanced", seed=order), folder, order, num_sms=1)


@pytest.mark.parametrize("max_resident", [2, 80])
def test_few_rows_are_spread_over_all_blocks_of_which_any_may_be_resident(folder, max_resident, monkeypatch):
    """Each warp begins with an item or has none, and takes others only while it waits."""
    monkeypatch.setattr(plan_kernel, "plan_shape", lambda _: (512, 1))
    for order, kind in enumerate(("ragged with holes", "skewed")):
        scene = Scene(num_nodes=1, ranks_per_node=2 + order, kind=kind, seed=order)
        play(scene, folder, order, num_sms=80, max_resident=max_resident)


NUM_EXPERTS, NUM_TOPK, NUM_TOKENS = 6, 3, 40


class Repeated:
    """Dispatches into static rows of one node, one after the other, which no host waits for."""

    def __init__(self, folder, order: int, num_ranks: int = 2, timeout_s: float = 60.0, patience: int = 1) -> None:
        capacity = Capacity(max_tokens_per_rank=NUM_TOKENS, max_bytes_per_token=8, num_topk=NUM_TOPK)
        topology = Topology.of_equal_nodes(num_ranks, num_ranks)
        self.layout = DeviceLayout(topology, capacity, Settings(timeout_s=timeout_s))
        self.placement = ExpertPlacement.contiguous(NUM_EXPERTS, num_ranks)
        self.machine = (emulated := Emulated(folder, order, patience)).machine
        self.world = emulated.world(self.layout, self.placement, num_sms=2)

    def request(self, rank: int, number: int, dtype: torch.dtype, num_tokens: int = NUM_TOKENS) -> DispatchRequest:
        """Rows that are like their weights, which are in ``dtype``: the number of the token, and of the dispatch."""
        generator = torch.Generator().manual_seed(100 * number + rank)
        token = torch.arange(1, num_tokens + 1, dtype=torch.float64) + 1000 * number
        weights = token[:, None].expand(-1, NUM_TOPK).to(dtype).contiguous()
        return DispatchRequest(
            routing=Routing(torch.randint(-1, NUM_EXPERTS, weights.shape, generator=generator), weights),
            payloads=[token],
            placement=self.placement,
            balancer=lambda *_: None,
            expert_alignment=1,
            static=StaticRows(self.layout.num_ranks * NUM_TOKENS * NUM_TOPK),
            launch=Launch(),
        )


def dispatch(at: Rank, request: DispatchRequest) -> tuple[torch.Tensor, DevicePlan]:
    """Rows in all slots there are; the plan says how many of these have something."""
    output = at.dispatch(request)
    return output.rows[0], output.plan


@pytest.mark.parametrize("order", range(8))
@pytest.mark.parametrize("tokens_of_rank_0", [NUM_TOKENS, 0])
def test_routing_of_one_plan_is_not_overwritten_by_that_of_the_next(folder, order, tokens_of_rank_0):
    repeated = Repeated(folder, order)

    def on_rank(at: Rank) -> None:
        dtypes = (torch.float32, torch.float64) * 3
        num_tokens = NUM_TOKENS if at.rank else tokens_of_rank_0
        requests = [repeated.request(at.rank, number, dtype, num_tokens) for number, dtype in enumerate(dtypes)]
        sent = [dispatch(at, request) for request in requests]
        for number, (rows, plan) in enumerate(sent):
            end = int(plan.block_to_first_slot[-1])
            assert torch.equal(plan.slot_weights[:end].double(), rows[:end]), f"dispatch {number} on rank {at.rank}"
            assert (rows[:end] // 1000 == number).all()

    repeated.world.run(on_rank)


def test_an_invalid_id_of_a_dispatch_that_no_host_waits_for_outlives_later_ones(folder):
    repeated = Repeated(folder, order=1)

    def on_rank(at: Rank) -> list[Any]:
        told: list[Any] = []
        for token in (3, 5, 6):
            request = repeated.request(at.rank, token, torch.float32)
            if at.rank == 1:
                request.routing.topk_idx[token, 1] = NUM_EXPERTS + token
            try:
                dispatch(at, request if token < 6 else replace(request, static=None))
            except ValueError as error:
                told.append(str(error).partition("topk_idx")[2])
        return [*told, *(at.arena.plan_report.take_invalid_pair(is_static=True) for _ in range(2))]

    told = f"[6, 1] = {NUM_EXPERTS + 6} is no expert: ids go from 0 to {NUM_EXPERTS - 1}, and -1 means none"
    assert repeated.world.run(on_rank) == [[told, (1, 3, 1, NUM_EXPERTS + 3), None]] * 2


@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize("age", [0, 2**32 - 100], ids=["fresh", "old"])
def test_epochs_wrap_around(folder, order, age):
    """Flags of tokens that were not used for any number of epochs, almost all of them, are not taken for new ones."""
    repeated, last = Repeated(folder, order), -3  # as an unsigned number, three epochs before it is 0 again

    def on_rank(at: Rank) -> None:
        layout, arena = repeated.layout, at.arena
        arena._state[EPOCHS] = last
        arena.buffers[0].memory[: layout.offsets["ids"]].view(torch.int32).fill_(last)
        old = arena.buffers[0].memory[layout.offsets["rows_ready"] : layout.offsets["ids"]].view(torch.int32)
        old.fill_(last - age + 2**32 if age else last)
        at.session.agree(CollectiveFingerprint("begin"))  # barrier: no rank begins before all are here
        for number in range(6):
            request = repeated.request(at.rank, number, torch.float32)
            rows, plan = dispatch(at, request)
            assert (rows[: int(plan.block_to_first_slot[-1])] // 1000 == number).all()
            out = at.combine(plan, rows[:, None].clone(), is_weighted=False)
            num_terms = out[:, 0] / request.payloads[0]
            assert torch.equal(num_terms, num_terms.round())
            assert num_terms.max() <= NUM_TOPK
        assert arena._state[EPOCHS].tolist() == [last + 6] * len(EPOCHS)

    repeated.world.run(on_rank)


def test_a_rank_that_does_not_come_is_named_on_the_device_and_has_the_rows_that_the_plan_did_not_wait_for(folder):
    repeated = Repeated(folder, order=1, num_ranks=3, timeout_s=0.05, patience=1000)

    def on_rank(at: Rank) -> tuple[Arena, torch.Tensor | None]:
        request = repeated.request(at.rank, 0, torch.float32)
        if at.rank == 1:
            pending = at.shuffle.prepare_dispatch(request, Call(1, CallProfile()), at.stream)
            at.session.agree(CollectiveFingerprint("dispatch", request.fields), pending.counts)  # and launches nothing
            return at.arena, None
        return at.arena, dispatch(at, request)[0]

    arenas, outputs = zip(*repeated.world.run(on_rank), strict=True)
    flags_of_rank_1 = arenas[1].buffers[0].memory[repeated.layout.offsets["rows_ready"] :].view(torch.int32)
    num_flags = NUM_TOKENS * MAX_PARTS
    for rank in (0, 2):
        assert (outputs[rank].view(torch.uint8) == 0xFF).all()
        assert 1 in flags_of_rank_1[rank * num_flags : (rank + 1) * num_flags]
        stall = stall_of(arenas[rank].failure, arenas[rank].node_ranks)
        assert stall.phase == "exchanging routing on the device"
        assert stall.on_ranks == (1,)
    assert not arenas[1].failure.is_set


def before_its_plan(at: Rank) -> None:
    at.shuffle._planner.new_plan = die


def before_it_scatters_rows(at: Rank) -> None:
    at.shuffle._own_rows.scatter = plan_and_die


def before_its_combine(at: Rank) -> None:
    at.combine = die


class Died(Exception):  # noqa: N818  no error of the test
    """Ends what a rank launches."""


def die(*_: Any, **__: Any) -> None:
    raise Died


def plan_and_die(*arguments: Any, planning: Any = None) -> None:
    """Take the place of ``OwnRows.scatter``, which launches the plan, too."""
    (planning or arguments[-1]).launch()
    raise Died


# The phase that the others are in, and how many of the outputs (dispatch, combine) of this replay they complete.
DEATHS = {
    before_its_plan: ("exchanging routing on the device", 0),
    before_it_scatters_rows: ("receiving rows", 0),
    before_its_combine: ("adding partial sums", 1),
}


@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize("death", DEATHS, ids=lambda death: death.__name__)
def test_a_replay_that_a_rank_has_missed_gives_poison_and_so_do_all_later_ones(death, order, folder):
    repeated = Repeated(folder, order, num_ranks=3, patience=1000)
    phase, num_complete = DEATHS[death]
    victim, num_replays = 1, 3

    def on_rank(at: Rank) -> Any:
        # As in replays, hosts agree on nothing in between.
        request, call = repeated.request(at.rank, 1, torch.float32), Call(1, CallProfile())
        pending = at.shuffle.prepare_dispatch(request, call, at.stream)
        counts = at.session.agree(CollectiveFingerprint("dispatch", request.fields), pending.counts)
        outputs: list[torch.Tensor] = []
        for replay in range(num_replays):
            if replay == 1 and at.rank == victim:
                death(at)
            try:
                sent = pending.run(counts)
                ones = torch.ones(len(sent.rows[0]), 1)
                outputs += [sent.rows[0], at.combine(sent.plan, ones, is_weighted=False)]
            except Died:
                return None
        at.arena.abort()  # by the host's watch
        return outputs, sent.plan, stall_of(at.arena.failure, at.arena.node_ranks)

    for rank, result in enumerate(repeated.world.run(on_rank)):
        if rank == victim:
            continue
        outputs, plan, stall = result
        assert (stall.phase, stall.on_ranks) == (phase, (victim,))
        is_poison = [bool((output.view(torch.uint8) == 0xFF).all()) for output in outputs]
        num_valid = 2 + num_complete
        assert is_poison == [False] * num_valid + [True] * (2 * num_replays - num_valid)
        num_terms = (repeated.request(rank, 1, torch.float32).routing.topk_idx >= 0).sum(1)
        assert torch.equal(outputs[1][:, 0], num_terms.float())
        assert (plan.row_to_slots == -1).all()
        assert (plan.num_rows_per_expert == 0).all()


class PlayWithoutNetwork(EmulatedPlay):
    """A play after which the network of rank 0 fails, and a dispatch and a combine that show it."""

    def _on_rank(self, at: Rank) -> Any:
        before = super()._on_rank(at)
        torch.zeros(1)  # after all of that
        if at.rank == 0:
            at.arena.abort_after_network()
        sent = at.dispatch(self._request(at.rank, self._payloads(at)))
        out = at.combine(sent.plan, torch.ones(len(sent.rows[0]), 3), is_weighted=False)
        return before, [*sent.rows, out], at.arena


@pytest.mark.parametrize("order", range(2))
def test_what_depends_on_a_network_that_has_failed_is_poison(order, folder):
    whole = PlayWithoutNetwork(Scene(num_nodes=2, ranks_per_node=1, kind="balanced", seed=order), folder)
    results = whole.run(order)
    whole.check([before for before, _, _ in results])
    for rank, (_, outputs, arena) in enumerate(results):
        assert [bool((output.view(torch.uint8) == 0xFF).all()) for output in outputs] == [rank == 0] * len(outputs)
        assert bool(arena.failure.is_set) == (rank == 0)
    failed = results[0][2]
    assert stall_of(failed.failure, failed.node_ranks).phase == "the network"


def alone(folder, program) -> Any:
    """What a program gives on the only rank of a world, with whatever kernels it launches."""
    capacity = Capacity(max_tokens_per_rank=1, max_bytes_per_token=8, num_topk=1)
    layout = DeviceLayout(Topology((0,)), capacity, Settings())
    return Emulated(folder, order=2).world(layout, ExpertPlacement.contiguous(1, 1)).run(program)[0]


@pytest.mark.parametrize("num_segments", [2, 3, 40])
def test_scattered_segments_are_copied(num_segments, folder):
    random = random_of("segments", num_segments)
    sizes = torch.randint(0, 70_000 // num_segments, (num_segments,), generator=random)
    src = torch.randint(0, 256, (int(sizes.sum()) + 5,), generator=random, dtype=torch.uint8)
    order = torch.randperm(num_segments, generator=random)
    starts = sizes.cumsum(0) - sizes
    dst_starts = torch.empty_like(starts)
    dst_starts[order] = sizes[order].cumsum(0) - sizes[order] + 3
    expected = torch.zeros_like(src)
    copy_segments(src, starts, expected, dst_starts, sizes)

    def program(at: Rank) -> torch.Tensor:
        dst = torch.zeros_like(src)
        copy_on_device(at.context.launcher(at.stream), src, starts, dst, dst_starts, sizes)
        return dst

    assert torch.equal(alone(folder, program), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("num_rows", "hidden"), [(1, 1), (30, 33), (9, 520)])
def test_gradients_of_weights(num_rows, hidden, dtype, folder):
    random = random_of(num_rows, hidden)
    grads, rows = (torch.randn(num_rows, hidden, generator=random).to(dtype) for _ in range(2))
    weights = torch.rand(num_rows, generator=random)
    expected, _ = weight_gradients(grads, rows, weights)

    def program(at: Rank) -> tuple[torch.Tensor, torch.Tensor | None]:
        weighted = grads.clone()
        return weighted, launch_weight_gradients(at.library, at.stream.cuda_stream, weighted, rows, weights)

    weighted, dots = alone(folder, program)
    assert_same_bits(weighted, expected, "weighted rows")
    products = grads.double() * rows.double()
    bound = (hidden + 2) * torch.finfo(dots.dtype).eps * products.abs().sum(1)
    assert bool(((dots.double() - products.sum(1)).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("num_tokens", "num_topk", "hidden"), [(0, 2, 8), (7, 1, 33), (30, 8, 96), (5, 11, 1)])
def test_weighted_sums_have_the_twins_bits(num_tokens, num_topk, hidden, dtype, folder):
    random = random_of("weighted sum", num_tokens, hidden)
    rows = torch.randn(13, hidden, generator=random).to(dtype)
    row_idx = torch.randint(-2, 16, (num_tokens, num_topk), generator=random)  # some name no row
    weights = torch.rand(num_tokens, num_topk, generator=random)

    def program(at: Rank) -> torch.Tensor:
        return launch_weighted_sum(at.library, at.stream.cuda_stream, rows, row_idx, weights)

    assert_same_bits(alone(folder, program), weighted_sum(rows, row_idx, weights), "weighted sums")
