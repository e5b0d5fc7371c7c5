"""Functions on ranks: one rank makes an invalid call, the others do not; then all continue."""

from __future__ import annotations

import contextlib
import errno
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_setup import Setup, check_combine, law_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

import fusco
from comparison import assert_same_bits, world_rows
from fusco.cpu.recycler import OutputRecycler
from generator import any_bits

HIDDEN = 3


@dataclass(frozen=True)
class Outcome:
    """Outcome of a call on a rank: type and text of the error (``""`` for none), and the duration."""

    kind: str
    text: str
    seconds: float


@dataclass
class Scene:
    """A communicator after one dispatch, and valid arguments for the next calls."""

    comm: fusco.Communicator
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    handle: fusco.Handle
    y: torch.Tensor


def attempt(call: Callable[[], Any]) -> Outcome:
    start = time.monotonic()
    try:
        call()
    except Exception as error:  # noqa: BLE001  the test compares it
        return Outcome(type(error).__name__, str(error), time.monotonic() - start)
    return Outcome("", "", time.monotonic() - start)


def make_mistake(
    group: dist.ProcessGroup,
    setup: Setup,
    mistaken_rank: int,
    mistake: Callable[[Scene], Any],
    good_call: Callable[[Scene], Any],
) -> Outcome:
    """Call ``mistake`` on one rank and ``good_call`` on all others; afterwards all collectives work."""
    with setup.open(group) as comm:
        case = setup.case("ragged", 5, comm.topology.world_size, setup.num_topk)
        ids, weights = case.topk_idx(comm.rank), case.topk_weights(comm.rank)
        x = torch.ones(case.num_tokens(comm.rank), HIDDEN)
        dispatched = comm.dispatch(x, ids, weights)
        scene = Scene(comm, x, ids, weights, dispatched.handle, dispatched.rows.clone())
        outcome = attempt(lambda: (mistake if comm.rank == mistaken_rank else good_call)(scene))
        check_that_it_works(comm, setup)
    return outcome


def check_that_it_works(comm: fusco.Communicator, setup: Setup) -> None:
    case = setup.case("ragged with holes", 8, comm.topology.world_size)
    law = law_of(comm, case)
    x = [any_bits((case.num_tokens(rank), HIDDEN), torch.float32, "x", rank) for rank in law.ranks]
    dispatched = comm.dispatch(x[comm.rank], case.topk_idx(comm.rank), case.topk_weights(comm.rank))
    assert_same_bits(dispatched.rows, law.rows(comm.rank, x), "dispatch after a mistake")
    y = world_rows(law, HIDDEN, torch.float32, 1)
    check_combine(comm, law, dispatched.handle, case.world_topk_weights(), y)


# Good calls.


def dispatch(scene: Scene) -> None:
    scene.comm.dispatch(scene.x, scene.ids, scene.weights)


def dispatch_again(scene: Scene) -> None:
    scene.comm.dispatch_again(scene.x, scene.handle)


def combine(scene: Scene) -> None:
    scene.comm.combine(scene.y, scene.handle)


def shuffle(scene: Scene) -> None:
    scene.comm.shuffle({}, {})


def combine_all(scene: Scene) -> None:
    scene.comm.combine_all([scene.y], scene.handle)


def dispatch_weights(scene: Scene) -> None:
    scene.comm.dispatch_weights(scene.weights, scene.handle)


def combine_weights(scene: Scene) -> None:
    scene.comm.combine_weights(scene.y[:, 0], scene.handle)


# Mistakes in what is made of arguments before a verb.


def combine_all_of_a_list(scene: Scene) -> None:
    scene.comm.combine_all([scene.y.tolist()], scene.handle)  # type: ignore[list-item]


def dispatch_weights_of_a_list(scene: Scene) -> None:
    scene.comm.dispatch_weights(scene.weights.tolist(), scene.handle)  # type: ignore[arg-type]


def combine_weights_of_too_few_rows(scene: Scene) -> None:
    scene.comm.combine_weights(scene.y[1:, 0], scene.handle)


def fail_before_a_verb(scene: Scene) -> None:
    with scene.comm.rejecting():
        raise LookupError("no such layer")


# Mistakes in dispatch.


def ids_of_wrong_dtype(scene: Scene) -> None:
    scene.comm.dispatch(scene.x, scene.ids.float(), scene.weights)


def ids_of_wrong_shape(scene: Scene) -> None:
    scene.comm.dispatch(scene.x, scene.ids[:, 0])


def ids_as_list(scene: Scene) -> None:
    scene.comm.dispatch(scene.x, scene.ids.tolist(), scene.weights)  # type: ignore[arg-type]


def id_too_large(scene: Scene) -> None:
    ids = scene.ids.clone()
    ids[0, 1] = scene.comm.placement.num_experts
    scene.comm.dispatch(scene.x, ids, scene.weights)


def id_below_minus_one(scene: Scene) -> None:
    ids = scene.ids.clone()
    ids[0, 0] = -2
    scene.comm.dispatch(scene.x, ids, scene.weights)


def ids_on_another_device(scene: Scene) -> None:
    scene.comm.dispatch(scene.x, scene.ids.to("meta"))


def too_many_experts(scene: Scene) -> None:
    scene.comm.dispatch(scene.x, scene.ids.repeat(1, 2))


def too_many_tokens(scene: Scene) -> None:
    scene.comm.dispatch(torch.ones(100, HIDDEN), torch.zeros(100, scene.ids.shape[1], dtype=torch.int64))


def rows_too_wide(scene: Scene) -> None:
    scene.comm.dispatch(torch.ones(len(scene.ids), 65), scene.ids, scene.weights)


def rows_too_wide_together(scene: Scene) -> None:
    scene.comm.dispatch([torch.ones(len(scene.ids), 33)] * 2, scene.ids, scene.weights)


def rows_without_elements(scene: Scene) -> None:
    scene.comm.dispatch(torch.ones(len(scene.ids), 0), scene.ids, scene.weights)


def too_few_rows(scene: Scene) -> None:
    scene.comm.dispatch(scene.x[1:], scene.ids, scene.weights)


def no_payload(scene: Scene) -> None:
    scene.comm.dispatch([], scene.ids, scene.weights)


def nine_payloads(scene: Scene) -> None:
    scene.comm.dispatch([scene.x] * 9, scene.ids, scene.weights)


def rows_of_no_tensor(scene: Scene) -> None:
    scene.comm.dispatch(None, scene.ids, scene.weights)  # type: ignore[arg-type]


def rows_on_another_device(scene: Scene) -> None:
    scene.comm.dispatch(scene.x.to("meta"), scene.ids, scene.weights)


def sparse_rows(scene: Scene) -> None:
    scene.comm.dispatch(scene.x.to_sparse(), scene.ids, scene.weights)


def weights_of_wrong_shape(scene: Scene) -> None:
    scene.comm.dispatch(scene.x, scene.ids, scene.weights[:, :1])


def weights_of_wrong_dtype(scene: Scene) -> None:
    scene.comm.dispatch(scene.x, scene.ids, scene.ids)


def weights_wanted_but_not_given(scene: Scene) -> None:
    scene.comm.dispatch(scene.x, scene.ids, with_weights=True)


def alignment_of_zero(scene: Scene) -> None:
    scene.comm.dispatch(scene.x, scene.ids, scene.weights, expert_alignment=0)


def alignment_of_no_integer(scene: Scene) -> None:
    scene.comm.dispatch(scene.x, scene.ids, scene.weights, expert_alignment=1.5)  # type: ignore[arg-type]


def alignment_beyond_counting(scene: Scene) -> None:
    scene.comm.dispatch(scene.x, scene.ids, scene.weights, expert_alignment=10**12)


def weights_that_cannot_be_read(scene: Scene) -> None:
    out_of_memory = torch.OutOfMemoryError("no memory for weights")
    weights = scene.weights.bfloat16()  # which travel as float32
    with mock.patch.object(torch.Tensor, "float", side_effect=out_of_memory):
        scene.comm.dispatch(scene.x, scene.ids, weights)


def too_few_static_rows(scene: Scene) -> None:
    scene.comm.dispatch(scene.x, scene.ids, scene.weights, static=fusco.StaticRows(1))


def gradients_of_two_payloads(scene: Scene) -> None:
    scene.comm.dispatch([scene.x, scene.x.clone().requires_grad_()], scene.ids, scene.weights)


# Tensors without plain memory.


def quantised_rows(scene: Scene) -> None:
    scene.comm.dispatch(torch.quantize_per_tensor(scene.x, 0.1, 0, torch.qint8), scene.ids, scene.weights)


def nested_rows(scene: Scene) -> None:
    rows = torch.nested.nested_tensor([torch.ones(HIDDEN) for _ in scene.x])
    scene.comm.dispatch(rows, scene.ids, scene.weights)


def fake_rows(scene: Scene) -> None:
    scene.comm.dispatch(FakeTensorMode().from_tensor(scene.x), scene.ids, scene.weights)


def freed_rows(scene: Scene) -> None:
    rows = scene.x.clone()
    rows.untyped_storage().resize_(0)
    scene.comm.dispatch(rows, scene.ids, scene.weights)


def rows_of_a_mesh(scene: Scene) -> None:
    class OfMesh(TwoTensor):
        """A tensor subclass whose values are in other tensors, as in DTensor."""

    scene.comm.dispatch(OfMesh(scene.x, scene.x), scene.ids, scene.weights)


def fake_ids(scene: Scene) -> None:
    scene.comm.dispatch(scene.x, FakeTensorMode().from_tensor(scene.ids), scene.weights)


def rows_under_grad(scene: Scene) -> None:
    torch.func.grad(lambda x: scene.comm.dispatch(x, scene.ids, scene.weights).rows.sum())(scene.x)


def plain_rows_under_grad(scene: Scene) -> None:
    torch.func.grad(lambda x: (scene.comm.dispatch(scene.x, scene.ids, scene.weights), x.sum())[1])(scene.x)


def rows_under_vmap(scene: Scene) -> None:
    torch.func.vmap(lambda x: scene.comm.dispatch(x, scene.ids, scene.weights).rows)(scene.x[None])


def rows_under_jvp(scene: Scene) -> None:
    torch.func.jvp(lambda x: scene.comm.dispatch(x, scene.ids, scene.weights).rows, (scene.x,), (scene.x,))


def rows_with_a_tangent(scene: Scene) -> None:
    with forward_ad.dual_level():
        scene.comm.dispatch(forward_ad.make_dual(scene.x, scene.x), scene.ids, scene.weights)


def rows_while_faking(scene: Scene) -> None:
    with FakeTensorMode():
        scene.comm.dispatch(scene.x, scene.ids, scene.weights)


def y_under_grad(scene: Scene) -> None:
    torch.func.grad(lambda y: scene.comm.combine(y, scene.handle).sum())(scene.y)


def shuffle_of_freed_memory(scene: Scene) -> None:
    base = torch.zeros(2)
    segments = whole(base)
    base.untyped_storage().resize_(0)
    scene.comm.shuffle({0: segments}, {})


def exchange(scene: Scene) -> None:
    scene.comm.all_to_all(torch.zeros(4, HIDDEN), torch.ones(4, HIDDEN))


def exchange_of_quantised_rows(scene: Scene) -> None:
    source = torch.quantize_per_tensor(torch.ones(4, HIDDEN), 0.1, 0, torch.qint8)
    scene.comm.all_to_all(torch.empty_like(source), source)


# Mistakes in dispatch_again and combine.


def again_with_other_tokens(scene: Scene) -> None:
    scene.comm.dispatch_again(torch.ones(len(scene.x) + 1, HIDDEN), scene.handle)


def again_along_no_handle(scene: Scene) -> None:
    scene.comm.dispatch_again(scene.x, scene.handle.plan)  # type: ignore[arg-type]


def y_of_wrong_length(scene: Scene) -> None:
    scene.comm.combine(torch.ones(len(scene.y) + 1, HIDDEN), scene.handle)


def y_of_three_dimensions(scene: Scene) -> None:
    scene.comm.combine(scene.y[:, :, None], scene.handle)


def y_of_wrong_dtype(scene: Scene) -> None:
    scene.comm.combine(scene.y.long(), scene.handle)


def y_too_wide(scene: Scene) -> None:
    scene.comm.combine(torch.ones(len(scene.y), 65), scene.handle)


def y_of_no_tensor(scene: Scene) -> None:
    scene.comm.combine(scene.y.tolist(), scene.handle)  # type: ignore[arg-type]


def combine_with_a_tensor_of_weights(scene: Scene) -> None:
    scene.comm.combine(scene.y, scene.handle, weights=torch.ones(len(scene.y)))  # type: ignore[arg-type]


def combine_with_other_weights(scene: Scene) -> None:
    scene.comm.combine(scene.y, scene.handle, weights="softmax")  # type: ignore[arg-type]


# Mistakes in shuffle.


def shuffle_with_an_unknown_rank(scene: Scene) -> None:
    scene.comm.shuffle({17: whole(torch.zeros(2))}, {})


def shuffle_of_no_segments(scene: Scene) -> None:
    scene.comm.shuffle({0: torch.zeros(2)}, {})  # type: ignore[dict-item]


def shuffle_of_no_mapping(scene: Scene) -> None:
    scene.comm.shuffle(None, {})  # type: ignore[arg-type]


def shuffle_without_receive(scene: Scene) -> None:
    scene.comm.shuffle({}, None)  # type: ignore[arg-type]


def shuffle_with_a_string(scene: Scene) -> None:
    scene.comm.shuffle({"a": whole(torch.zeros(2))}, {})  # type: ignore[dict-item]


def whole(base: torch.Tensor) -> fusco.Segments:
    return fusco.Segments(base, torch.tensor([0]), torch.tensor([base.nbytes]))


# Calls that do not match those of the other ranks.


def dispatch_other_width(scene: Scene) -> None:
    scene.comm.dispatch(torch.ones(len(scene.x), HIDDEN + 1), scene.ids, scene.weights)


def dispatch_other_dtype(scene: Scene) -> None:
    scene.comm.dispatch(scene.x.half(), scene.ids, scene.weights)


def dispatch_other_num_topk(scene: Scene) -> None:
    scene.comm.dispatch(scene.x, scene.ids[:, 1:], scene.weights[:, 1:])


def dispatch_without_weights(scene: Scene) -> None:
    scene.comm.dispatch(scene.x, scene.ids)


def dispatch_other_weights(scene: Scene) -> None:
    scene.comm.dispatch(scene.x, scene.ids, scene.weights.double())


def dispatch_with_gradients(scene: Scene) -> None:
    scene.comm.dispatch(scene.x.clone().requires_grad_(), scene.ids, scene.weights)


def dispatch_more_payloads(scene: Scene) -> None:
    scene.comm.dispatch([scene.x, scene.x], scene.ids, scene.weights)


def combine_other_dtype(scene: Scene) -> None:
    scene.comm.combine(scene.y.bfloat16(), scene.handle)


def combine_unweighted(scene: Scene) -> None:
    scene.comm.combine(scene.y, scene.handle, weights=None)


def shuffle_to_all(scene: Scene) -> None:
    everyone = range(scene.comm.topology.world_size)
    scene.comm.shuffle({rank: whole(torch.zeros(2)) for rank in everyone}, {})


# Communicators that are closed, foreign, or cannot be created.


def use_foreign_handle(group: dist.ProcessGroup, setup: Setup) -> list[Outcome]:
    """Use a handle of one communicator with another one of the same kind, on all ranks."""
    with setup.open(group) as comm, setup.open(group) as other:
        case = setup.case("ragged", 5, comm.topology.world_size)
        x = torch.ones(case.num_tokens(comm.rank), HIDDEN)
        dispatched = comm.dispatch(x, case.topk_idx(comm.rank))
        outcomes = [
            attempt(lambda: other.combine(dispatched.rows, dispatched.handle)),
            attempt(lambda: other.dispatch_again(x, dispatched.handle)),
        ]
        check_that_it_works(other, setup)
        return outcomes


def use_after_close(group: dist.ProcessGroup, setup: Setup) -> dict[str, Outcome]:
    """Call every collective on a closed communicator."""
    comm = setup.open(group)
    case = setup.case("ragged", 5, comm.topology.world_size)
    x = torch.ones(case.num_tokens(comm.rank), HIDDEN)
    first = comm.dispatch(x, case.topk_idx(comm.rank))
    comm.close()
    other = (comm.rank + 1) % comm.topology.world_size
    return {
        "dispatch": attempt(lambda: comm.dispatch(x, case.topk_idx(comm.rank))),
        "dispatch_again": attempt(lambda: comm.dispatch_again(x, first.handle)),
        "combine": attempt(lambda: comm.combine(first.rows, first.handle)),
        "shuffle": attempt(lambda: comm.shuffle({}, {})),
        "gather_send": attempt(lambda: comm.gather_send(whole(x), other)),
        "scatter_recv": attempt(lambda: comm.scatter_recv(whole(x), other)),
        "close": attempt(comm.close),
    }


def dispatch_without_memory(group: dist.ProcessGroup, setup: Setup, mistaken_rank: int) -> list[Outcome]:
    """Dispatch while one rank has no memory for its output."""
    comm = setup.open(group)
    no_memory = OSError(errno.ENOMEM, "Cannot allocate memory")
    has_none = mock.patch.object(OutputRecycler, "_take", side_effect=no_memory)
    with has_none if comm.rank == mistaken_rank else contextlib.nullcontext():
        return _dispatch_twice_and_close(comm, setup)


def dispatch_balanced_badly(group: dist.ProcessGroup, setup: Setup) -> list[Outcome]:
    """Dispatch with a balancer that does not return groups, on all ranks."""

    def balance_badly(_: fusco.Traffic) -> Any:
        return "static"

    with mock.patch.dict(fusco.BALANCERS, {setup.balancer: balance_badly}):
        comm = setup.open(group)
    return _dispatch_twice_and_close(comm, setup)


@contextlib.contextmanager
def balanced_by(balancer: Any, setup: Setup, group: dist.ProcessGroup) -> Iterator[fusco.Communicator]:
    """Open a communicator with the given balancer."""
    with mock.patch.dict(fusco.BALANCERS, {setup.balancer: balancer}):
        comm = setup.open(group)
    with comm:
        yield comm


def dispatch_balanced_differently(group: dist.ProcessGroup, setup: Setup, mistaken_ranks: list[int]) -> Outcome:
    """Dispatch with balancers of one name that return different groups once; afterwards all collectives work."""
    num_calls = itertools.count()

    def balance(traffic: fusco.Traffic) -> fusco.Groups:
        locals_ = range(traffic.topology.ranks_per_node)
        shift = int(next(num_calls) == 0 and dist.get_rank(group) in mistaken_ranks)
        turned = [
            tuple((local + shift * n) % len(locals_) for n in range(traffic.topology.num_nodes)) for local in locals_
        ]
        return fusco.Groups(traffic.topology, tuple(turned))

    with balanced_by(balance, setup, group) as comm:
        case = setup.case("ragged", 5, comm.topology.world_size)
        x, ids = torch.ones(case.num_tokens(comm.rank), HIDDEN), case.topk_idx(comm.rank)
        outcome = attempt(lambda: comm.dispatch(x, ids))
        for _ in range(3):
            check_that_it_works(comm, setup)
    return outcome


def _dispatch_twice_and_close(comm: fusco.Communicator, setup: Setup) -> list[Outcome]:
    """Return the outcomes of a dispatch, of another one after it, and of closing."""
    case = setup.case("ragged", 5, comm.topology.world_size)
    x, ids = torch.ones(case.num_tokens(comm.rank), HIDDEN), case.topk_idx(comm.rank)
    return [attempt(lambda: comm.dispatch(x, ids)), attempt(lambda: comm.dispatch(x, ids)), attempt(comm.close)]


def make_differently(group: dist.ProcessGroup, setup: Setup, mistaken_rank: int, changes: dict[str, Any]) -> Outcome:
    """Create a communicator with different arguments on one rank; afterwards all create a valid one."""
    arguments = {
        "num_experts": setup.num_experts,
        "num_topk": setup.num_topk,
        "max_tokens_per_rank": setup.max_tokens,
        "max_bytes_per_token": setup.max_bytes_per_token,
        "ranks_per_node": setup.ranks_per_node,
        "expert_placement": setup.expert_placement,
        "settings": setup.settings,
    }
    if mistaken_rank in (-1, dist.get_rank(group)):
        arguments.update(changes)
    outcome = attempt(lambda: fusco.Communicator(group, **arguments).close())
    with setup.open(group) as comm:
        check_that_it_works(comm, setup)
    return outcome
