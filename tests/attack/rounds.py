"""Rounds of random work on a communicator, each compared with the specification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from rank_setup import Setup, check_combine, law_of, poison
from shuffle_jobs import check_arrival, scattered

import fusco
from attack.configuration import random_placement
from comparison import assert_same_bits, world_rows
from generator import KINDS, Case, any_bits, random_of
from law import Law

_DTYPES = (
    *(torch.uint8, torch.bool, torch.int16, torch.int64, torch.float8_e4m3fn, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64),
)
_SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Round:
    """Inputs of a round. ``random`` is in the same state on all ranks; ``seed`` determines the round's tensors."""

    comm: fusco.Communicator
    setup: Setup
    random: Random
    seed: int

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def everyone(self) -> range:
        return range(self.comm.topology.world_size)

    def case(self) -> Case:
        """A routing of any kind."""
        kind, num_topk = self.random.choice(KINDS), self.random.randint(1, self.setup.num_topk)
        return self.setup.case(kind, self.random.randrange(1 << 30), len(self.everyone), num_topk)

    def alignment(self) -> int:
        return self.random.choice((1, 1, 2, 3, 8, 16))

    def rows_per_expert(self, alignment: int) -> int | None:
        """Rows of each expert of a masked output, often too few; or ``None`` for blocks that follow each other."""
        return self.random.choice((None, None, alignment, 3 * alignment, 40 * alignment))


def work(comm: fusco.Communicator, setup: Setup, *name: int | str) -> str:
    """Run one round; ``name`` is the same on all ranks and seeds it. Return its kind."""
    random = Random(repr(name))
    kinds, weights = zip(*_KINDS.items(), strict=True)
    kind = random.choices(kinds, weights)[0]
    try:
        kind(Round(comm, setup, random, random.randrange(1 << 30)))
    except fusco.FuscoError:
        raise
    except Exception as error:
        comm.synchronize()  # on CUDA only this says that a rank has failed, whose part is undefined
        raise AssertionError(f"{kind.__name__} of round {name}: {error}") from error
    return kind.__name__


def shuffle_tokens(at: Round) -> None:
    """Dispatch one or several payloads, dispatch again with the handle, and combine."""
    case, alignment = at.case(), at.alignment()
    law = law_of(at.comm, case, alignment, at.rows_per_expert(alignment))
    weights = _weights(at, case)
    with_weights = weights is not None and at.random.random() < 0.5
    spare = at.random.choice((None, None, 0, 1, 40))
    if law.rows_per_expert:
        static = fusco.StaticRows(rows_per_expert=law.rows_per_expert, on_overflow="drop")
    else:
        static = None if spare is None else fusco.StaticRows(max(1, len(law.slots(at.rank)) + spare))
    world = _payloads(at, case, "x")
    ids = case.topk_idx(at.rank).to(at.random.choice((torch.int32, torch.int64)))
    sent = at.comm.dispatch(
        _one_or_list(world[at.rank]),
        ids,
        None if weights is None else weights[at.rank],
        expert_alignment=alignment,
        with_weights=with_weights,
        static=static,
    )
    num_rows = len(law.slots(at.rank))
    behind = static.num_slots(len(law.counts(at.rank))) - num_rows if static else 0
    assert sent.rows.shape[: len(sent.handle.rows_shape)] == sent.handle.rows_shape
    assert sent.handle.num_rows == num_rows + behind
    assert sent.num_rows_per_expert.tolist() == law.counts(at.rank)
    assert sent.num_dropped_per_expert.tolist() == law.num_dropped(at.rank)
    _check_rows(at, law, sent.payloads, world)
    if with_weights:
        assert_same_bits(sent.weights.flatten()[:num_rows], law.row_weights(at.rank, weights), "weights of rows")
    poison(*sent.payloads)
    if at.random.random() < 0.5:
        world = _payloads(at, case, "again")
        again = at.comm.dispatch_again(_one_or_list(world[at.rank]), sent.handle)
        _check_rows(at, law, again, world)
        poison(*again)
    _combine(at, law, sent.handle, weights, behind)


def _combine(at: Round, law: Law, handle: fusco.Handle, weights: list[torch.Tensor] | None, behind: int) -> None:
    """Combine with and without weights: sums of small integers must be exact, others within their rounding error."""
    wire_dtype = at.setup.settings.wire_dtype
    dtype = at.random.choice(_SUMMED)
    hidden = at.setup.max_bytes_per_token // torch.promote_types(dtype, wire_dtype or dtype).itemsize
    hidden = at.random.randint(1, max(1, hidden))
    if hidden * torch.promote_types(dtype, wire_dtype or dtype).itemsize > at.setup.max_bytes_per_token:
        return
    for given in ([weights] if weights else []) + [None]:
        y = world_rows(law, hidden, dtype, at.seed)
        y[at.rank] = torch.nn.functional.pad(y[at.rank], (0, 0, 0, behind), value=float("nan"))
        poison(check_combine(at.comm, law, handle, given, y, wire_dtype))
    y = [_integers((len(law.slots(rank)), hidden), dtype, at.seed, "y", rank) for rank in law.ranks]
    sums = law.sums(at.rank, y, None, at.comm.topology.rank_to_node).exact
    y[at.rank] = torch.nn.functional.pad(y[at.rank], (0, 0, 0, behind), value=float("nan"))
    out = at.comm.combine(y[at.rank].view(*handle.rows_shape, hidden), handle, weights=None)
    assert torch.equal(out.double(), sums), "sums of integers"
    poison(out)


def drop_rows(at: Round) -> None:
    """Dispatch into a static output that is too small: the rows that fit arrive, and sums contain only those."""
    case, alignment = at.case(), at.alignment()
    law = law_of(at.comm, case, alignment)
    share = at.random.random()
    world_slots = [law.slots(rank) for rank in law.ranks]
    num_slots = [max(1, int(len(slots) * share)) for slots in world_slots]
    kept = [slots[:size] for slots, size in zip(world_slots, num_slots, strict=True)]
    world = _payloads(at, case, "x")
    static = fusco.StaticRows(num_slots[at.rank], on_overflow="drop")
    sent = at.comm.dispatch(
        _one_or_list(world[at.rank]), case.topk_idx(at.rank), expert_alignment=alignment, static=static
    )
    num_kept = len(kept[at.rank])
    expected = law.rows(at.rank, [payloads[0] for payloads in world])[:num_kept]
    assert_same_bits(sent.rows[:num_kept], expected, "rows that fit")
    assert int(sent.num_rows_per_expert.sum()) == sum(pair is not None for pair in kept[at.rank])
    num_terms = torch.zeros(case.num_tokens(at.rank), 1)
    for pair in (pair for slots in kept for pair in slots):
        if pair and pair.src == at.rank:
            num_terms[pair.token] += 1
    if at.setup.max_bytes_per_token >= 4:
        out = at.comm.combine(torch.ones(static.num_rows, 1), sent.handle)
        assert_same_bits(out, num_terms, "sums of rows that fit")


def differentiate(at: Round) -> None:
    """Gradients of rows, of weights and of row weights, all of small integers: they must be exact."""
    case, alignment = at.case(), at.alignment()
    law = law_of(at.comm, case, alignment, at.rows_per_expert(alignment))
    hidden, static = max(1, at.setup.max_bytes_per_token // 32), None
    if law.rows_per_expert:
        static = fusco.StaticRows(rows_per_expert=law.rows_per_expert, on_overflow="drop")
    shape = {rank: (case.num_tokens(rank), hidden) for rank in law.ranks}
    x, out_grads = ([_doubles(shape[r], at.seed, name, r) for r in law.ranks] for name in ("x", "out"))
    weights = [_doubles((case.num_tokens(r), case.num_topk), at.seed, "weights", r) for r in law.ranks]
    y, row_grads = ([_doubles((len(law.slots(r)), hidden), at.seed, n, r) for r in law.ranks] for n in ("y", "rows"))
    weight_grads = [_doubles((len(law.slots(r)),), at.seed, "weight grads", r) for r in law.ranks]

    mine = [tensors[at.rank].clone().requires_grad_() for tensors in (x, weights, y)]
    sent = at.comm.dispatch(
        mine[0], case.topk_idx(at.rank), mine[1], expert_alignment=alignment, with_weights=True, static=static
    )
    shape_of_rows = sent.handle.rows_shape
    out = at.comm.combine(mine[2].view(*shape_of_rows, hidden), sent.handle)
    loss = (out * out_grads[at.rank]).sum() + (sent.rows * row_grads[at.rank].view(sent.rows.shape)).sum()
    (loss + (sent.weights * weight_grads[at.rank].view(shape_of_rows)).sum()).backward()

    expected_x, expected_weights = torch.zeros_like(x[at.rank]), torch.zeros_like(weights[at.rank])
    expected_y = torch.zeros_like(y[at.rank])
    for owner in law.ranks:
        for slot, pair in enumerate(law.slots(owner)):
            if pair and pair.src == at.rank:
                expected_x[pair.token] += row_grads[owner][slot]
                slope = out_grads[at.rank][pair.token] @ y[owner][slot]
                expected_weights[pair.token, pair.k] = slope + weight_grads[owner][slot]
            if pair and owner == at.rank:
                expected_y[slot] = weights[pair.src][pair.token, pair.k] * out_grads[pair.src][pair.token]
    for name, leaf, expected in zip("xwy", mine, (expected_x, expected_weights, expected_y), strict=True):
        is_defined = ~law.undefined(at.rank) if name == "y" else slice(None)
        assert torch.equal(leaf.grad[is_defined], expected[is_defined]), f"gradient of {name} of {case}"


def exchange(at: Round) -> None:
    """All-to-all with uneven, empty and equal splits; sometimes with gradients."""
    share = at.random.random()
    splits = [[at.random.choice((0, at.random.randint(0, 40))) for _ in at.everyone] for _ in at.everyone]
    if share < 0.2:
        splits = [[at.random.randint(0, 9)] * len(at.everyone)] * len(at.everyone)
    shape = at.random.choice(((), (3,), (5, 7), (0,), (101,)))
    dtype = at.random.choice((torch.float32, torch.float64)) if share > 0.6 else at.random.choice(_DTYPES)
    schedule = at.random.choice((None, "exact", "few", "spread-out"))
    receive = [row[at.rank] for row in splits]

    def moved(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([sent.split(row)[at.rank] for sent, row in zip(rows, splits, strict=True)])

    world = [any_bits((sum(splits[rank]), *shape), dtype, at.seed, "exchange", rank) for rank in at.everyone]
    if share <= 0.6:
        output = torch.empty((sum(receive), *shape), dtype=dtype)
        poison(output)
        at.comm.all_to_all(output, world[at.rank], receive, splits[at.rank], schedule=schedule)
        assert_same_bits(output, moved(world), f"all_to_all by {schedule} of {splits}")
        return
    rows = world[at.rank].clone().requires_grad_()
    output = at.comm.all_to_all(None, rows, receive, splits[at.rank], schedule=schedule)
    assert_same_bits(output, moved(world), f"all_to_all by {schedule} of {splits}")
    # Each row's gradient is its number at its source, so it comes back in order.
    numbers = [torch.arange(len(sent), dtype=dtype) for sent in world]
    output.backward(moved(numbers).view(-1, *[1] * len(shape)).expand_as(output))
    assert torch.equal(rows.grad, numbers[at.rank].view(-1, *[1] * len(shape)).expand_as(rows)), "gradients"


def shuffle_segments(at: Round) -> None:
    """Shuffle scattered segments among all ranks."""
    sizes, largest = at.random.choice((((0, 1, 50), 20), ((0, 3000), 700), ((1, 2, 3), 1)))
    totals = {(s, d): at.random.choice(sizes) for s in at.everyone for d in at.everyone}
    dtype = at.random.choice((torch.uint8, torch.float32, torch.int16))

    def sent(src: int, dst: int) -> Any:
        return scattered(totals[src, dst], largest, dtype, at.seed, "send", src, dst)

    send = {dst: sent(at.rank, dst) for dst in at.everyone if totals[at.rank, dst] or dst % 2}
    receive = {
        src: scattered(totals[src, at.rank], largest // 2 + 1, torch.uint8, at.seed, "receive", src, at.rank)
        for src in at.everyone
        if totals[src, at.rank] or src % 2
    }
    before = {src: payload.segments.memory.clone() for src, payload in receive.items()}
    at.comm.shuffle(*({peer: p.segments for peer, p in part.items()} for part in (send, receive)))
    for src, payload in receive.items():
        check_arrival(payload, before[src], sent(src, at.rank).stream, f"from rank {src}")


def pass_on(at: Round) -> None:
    """Send segments from one rank to another."""
    if len(at.everyone) == 1:
        return
    src, dst = at.random.sample(at.everyone, 2)
    total, largest = at.random.choice(((0, 9), (1, 9), (4000, 900)))
    sent = scattered(total, largest, torch.float16, at.seed, "send")
    if at.rank == src:
        at.comm.gather_send(sent.segments, dst)
    elif at.rank == dst:
        received = scattered(total, largest, torch.uint8, at.seed, "receive")
        before = received.segments.memory.clone()
        at.comm.scatter_recv(received.segments, src)
        check_arrival(received, before, sent.stream, f"from rank {src}")


def replace_experts(at: Round) -> None:
    """Replace the placement of experts in places; all later rounds follow it."""
    if at.comm.placement.has_places:
        num_places = len(at.comm.placement.rank_to_experts[0])
        if num_places * len(at.everyone) < at.setup.num_experts:
            return  # some experts are lost with a rank, and there is no room for them
        placement = random_placement(at.random, at.setup.num_experts, len(at.everyone), num_places)
        at.comm.place(placement)
        assert at.comm.placement == placement


def reject_input(at: Round) -> None:
    """Invalid input on one rank: it raises the error, and all others raise ``RejectedInputError``."""
    mistaken = at.random.choice(at.everyone)
    error, text = fusco.RejectedInputError, f"rank {at.comm.topology.numbers[mistaken]} rejected its input"
    if at.rank == mistaken:
        error, text = ValueError, "the routing 1 tokens"
    x = torch.zeros(1 + (at.rank == mistaken), 1, dtype=torch.uint8)
    with pytest.raises(error, match=text):
        at.comm.dispatch(x, torch.zeros(1, 1, dtype=torch.int64))


_KINDS: dict[Callable[[Round], None], int] = {
    shuffle_tokens: 10,
    drop_rows: 2,
    differentiate: 4,
    exchange: 4,
    shuffle_segments: 2,
    pass_on: 2,
    replace_experts: 3,
    reject_input: 1,
}


def _weights(at: Round, case: Case) -> list[torch.Tensor] | None:
    dtype = at.random.choice((None, *_SUMMED))
    return None if dtype is None else case.world_topk_weights(dtype)


def _payloads(at: Round, case: Case, name: str) -> list[list[torch.Tensor]]:
    """Draw one to three payloads of each rank that fit into the bytes of a token."""
    room, kinds = at.setup.max_bytes_per_token, []
    for _ in range(at.random.randint(1, 3)):
        dtype = at.random.choice([dtype for dtype in _DTYPES if dtype.itemsize <= room] or [None])
        if dtype is None:
            break
        width = at.random.randint(1, min(room // dtype.itemsize, 40))
        shape = (2, width // 2) if width % 2 == 0 and at.random.random() < 0.5 else (width,)
        kinds.append((dtype, shape))
        room -= dtype.itemsize * width
    return [
        [any_bits((case.num_tokens(r), *shape), dtype, at.seed, name, i, r) for i, (dtype, shape) in enumerate(kinds)]
        for r in at.everyone
    ]


def _one_or_list(payloads: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    return payloads[0] if len(payloads) == 1 else payloads


def _check_rows(at: Round, law: Law, outputs: Any, world: list[list[torch.Tensor]]) -> None:
    assert len(outputs) == len(world[at.rank])
    for i, output in enumerate(outputs):
        expected, is_defined = law.rows(at.rank, [payloads[i] for payloads in world]), ~law.undefined(at.rank)
        rows = output.flatten(0, 1) if law.rows_per_expert else output
        assert_same_bits(rows[: len(expected)][is_defined], expected[is_defined], f"payload {i}")


def _integers(shape: tuple[int, ...], dtype: torch.dtype, *name: int | str) -> torch.Tensor:
    """Return random integers from -4 to 4: any sum over the experts of a token is exact in every dtype."""
    return torch.randint(-4, 5, shape, generator=random_of(*name)).to(dtype)


def _doubles(shape: tuple[int, ...], *name: int | str) -> torch.Tensor:
    return _integers(shape, torch.float64, *name)
