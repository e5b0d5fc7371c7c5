"""Functions on ranks: all-to-alls of every shape, compared with ``all_to_all_single``, and invalid calls."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fault_jobs import held
from mistake_jobs import Outcome, attempt, check_that_it_works
from rank_setup import Setup, pause_randomly

import fusco
from comparison import assert_same_bits
from fusco.api import functional
from fusco.bench.inputs.matrices import make_matrix, rows_of_routing
from fusco.bench.inputs.traffic import Trace, Workload
from generator import any_bits, values

# Dtypes and shapes of rows; most have an odd number of bytes, one has none.
ROWS: list[tuple[torch.dtype, tuple[int, ...]]] = [
    (torch.uint8, (7,)),
    (torch.bfloat16, (3, 5)),
    (torch.float32, ()),
    (torch.int64, (2,)),
    (torch.bool, (13,)),
    (torch.float16, (0,)),
    (torch.complex64, (1,)),
]
SCHEDULES = (None, "exact", "few", "spread-out")


def matrices(num_ranks: int, ranks_per_node: int) -> dict[str, np.ndarray]:
    """Matrices of rows that each rank sends to each other rank, by name."""
    shape, random = (num_ranks, num_ranks), np.random.default_rng(num_ranks)
    one_sender, one_receiver = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    one_sender[num_ranks // 2] = random.integers(1, 60, num_ranks)
    one_receiver[:, -1] = random.integers(1, 60, num_ranks)
    topology = fusco.Topology.of_equal_nodes(num_ranks, ranks_per_node)
    workload = Workload(
        pattern="trace",
        topology=topology,
        placement=fusco.ExpertPlacement.explicit([expert % num_ranks for expert in range(128)], num_ranks),
        tokens=16,
        hidden=1,
        num_topk=8,
        trace=Trace.load(None, None, 0),
    )
    return {
        "uniform": np.full(shape, 9),
        "random": random.integers(0, 40, shape),
        "zipf 0.3": make_matrix("zipf", num_ranks, largest=90, skew=0.3),
        "zipf 0.9": make_matrix("zipf", num_ranks, largest=200, skew=0.9, seed=1),
        "trace": rows_of_routing(workload),
        "one sender": one_sender,
        "one receiver": one_receiver,
        "one message": np.where(np.arange(num_ranks**2).reshape(shape) == num_ranks - 1, 300, 0),
        "empty splits": random.integers(0, 40, shape) * (random.random(shape) < 0.3),
        "nothing": np.zeros(shape, np.int64),
    }


def check_exchanges(group: dist.ProcessGroup, setup: Setup, longest_pause_ms: int = 0) -> int:
    """Compare all matrices and schedules with torch; return the number of exchanges."""
    count = 0
    with setup.open(group) as comm:
        ranks_per_node = comm.topology.ranks_per_node
        for name, matrix in matrices(comm.topology.world_size, ranks_per_node).items():
            for schedule in SCHEDULES:
                dtype, shape = ROWS[count % len(ROWS)]
                pause_randomly(comm.rank, count, longest_pause_ms)
                check_exchange(comm, group, matrix, dtype, shape, schedule)
                count += 1
            assert name
    return count


def check_exchange(
    comm: fusco.Communicator,
    group: dist.ProcessGroup,
    matrix: np.ndarray,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    schedule: Any,
) -> None:
    """Compare one exchange bit for bit; the input must not change, and nodes exchange no byte more than needed."""
    send, receive = matrix[comm.rank].tolist(), matrix[:, comm.rank].tolist()
    sent = any_bits((sum(send), *shape), dtype, "exchange", comm.rank)
    before = sent.clone()
    expected, output = (torch.empty((sum(receive), *shape), dtype=dtype) for _ in range(2))
    row_bytes = int(np.prod(shape)) * dtype.itemsize
    as_bytes = [tensor.view(-1).view(torch.uint8) for tensor in (expected, sent)]  # gloo does not know all dtypes
    splits = [[num_rows * row_bytes for num_rows in rows] for rows in (receive, send)]
    dist.all_to_all_single(*as_bytes, *splits, group=group)
    output.view(-1).view(torch.uint8).fill_(0xFF)
    comm.all_to_all(output, sent, receive, send, schedule=schedule)
    assert_same_bits(output, expected, f"{matrix.tolist()} {dtype} {shape} {schedule}")
    assert_same_bits(sent, before, "the input")
    nodes = np.array(comm.topology.rank_to_node)
    num_sent = torch.tensor(comm.profile.internode_row_bytes)
    dist.all_reduce(num_sent, group=group)
    assert num_sent == matrix[nodes[:, None] != nodes].sum() * row_bytes


def exchange_equally(group: dist.ProcessGroup, setup: Setup) -> None:
    """Exchange without splits, and from an input that is not contiguous."""
    with setup.open(group) as comm:
        world_size = comm.topology.world_size
        wide = any_bits((3 * world_size, 4), torch.int32, "equal", comm.rank)
        expected, output = (torch.empty(3 * world_size, 2, dtype=torch.int32) for _ in range(2))
        dist.all_to_all_single(expected, wide[:, ::2].contiguous(), group=group)
        comm.all_to_all(output, wide[:, ::2])
        assert_same_bits(output, expected, "equal splits")


def exchange_much(group: dist.ProcessGroup, setup: Setup, num_rows: int) -> None:
    """Exchange messages of many slices, then run other collectives on the same rings."""
    with setup.open(group) as comm:
        matrix = make_matrix("zipf", comm.topology.world_size, largest=num_rows, skew=0.8, seed=2)
        for schedule in SCHEDULES:
            check_exchange(comm, group, matrix, torch.uint8, (101,), schedule)
        check_that_it_works(comm, setup)


def check_gradients(group: dist.ProcessGroup, setup: Setup) -> None:
    """Compare outputs and gradients of every matrix and schedule with those of torch."""
    with setup.open(group) as comm:
        world_size = comm.topology.world_size
        for count, matrix in enumerate(matrices(world_size, comm.topology.ranks_per_node).values()):
            send, receive = matrix[comm.rank].tolist(), matrix[:, comm.rank].tolist()
            dtype = (torch.float32, torch.float64, torch.complex64)[count % 3]
            rows = values((sum(send), 2, 3), dtype, count, "rows", comm.rank).requires_grad_()
            grad = values((sum(receive), 2, 3), dtype, count, "grad", comm.rank)
            expected, expected_grad = torch.empty_like(grad), torch.empty_like(rows, requires_grad=False)
            dist.all_to_all_single(expected, rows.detach(), receive, send, group=group)
            dist.all_to_all_single(expected_grad, grad, send, receive, group=group)
            moved = comm.all_to_all(None, rows, receive, send, schedule=SCHEDULES[count % len(SCHEDULES)])
            assert_same_bits(moved, expected, f"{matrix.tolist()}")
            moved.backward(grad)
            assert_same_bits(rows.grad, expected_grad, f"gradient of {matrix.tolist()}")


def check_graphs(group: dist.ProcessGroup, setup: Setup) -> None:
    """No graph without gradients; gradients of gradients; equal splits; splits that the caller changes later."""
    with setup.open(group) as comm:
        num_ranks = comm.topology.world_size
        rows = values((2 * num_ranks, 2), torch.float64, "rows", comm.rank).requires_grad_()
        with torch.no_grad():
            assert not comm.all_to_all(None, rows).requires_grad
        assert not comm.all_to_all(None, rows.detach()).requires_grad
        output = torch.empty(2 * num_ranks, 2, dtype=torch.float64)
        assert comm.all_to_all(output, rows.detach()) is output

        sent, received = [2] * num_ranks, [2] * num_ranks
        moved = comm.all_to_all(None, rows, received, sent)
        assert_same_bits(moved, output, "with a graph")
        sent[0] = received[0] = 3
        (slope,) = torch.autograd.grad(moved.pow(3).sum(), rows, create_graph=True)
        torch.testing.assert_close(slope, 3 * rows.pow(2))
        (bend,) = torch.autograd.grad(slope.sum(), rows)
        torch.testing.assert_close(bend, 6 * rows)

        there_and_back = comm.all_to_all(None, comm.all_to_all(None, rows) * (comm.rank + 1))
        there_and_back.sum().backward()
        factors = torch.arange(1.0, num_ranks + 1, dtype=torch.float64).repeat_interleave(2)
        torch.testing.assert_close(rows.grad, factors[:, None].expand_as(rows))


# One rank's mistakes. Each gets a valid (comm, output, input, splits) of four ranks with two rows for each peer.

Call = Callable[[fusco.Communicator, torch.Tensor, torch.Tensor, list[int]], Any]


def good(comm, output, rows, splits):
    comm.all_to_all(output, rows, splits, splits)


def sends_more(comm, output, rows, splits):
    comm.all_to_all(output, rows, splits, [2, 5, 1, 0])


def other_dtype(comm, output, rows, splits):
    comm.all_to_all(output.double(), rows.double(), splits, splits)


def other_row(comm, output, rows, splits):
    comm.all_to_all(output.repeat(1, 2), rows.repeat(1, 2), splits, splits)


def other_schedule(comm, output, rows, splits):
    comm.all_to_all(output, rows, splits, splits, schedule="few")


def other_verb(comm, output, rows, splits):
    comm.shuffle({}, {})


def no_tensor(comm, output, rows, splits):
    comm.all_to_all(output, rows.tolist(), splits, splits)


def on_another_device(comm, output, rows, splits):
    comm.all_to_all(output, rows.to("meta"), splits, splits)


def without_dimension(comm, output, rows, splits):
    comm.all_to_all(output, rows[0, 0], splits, splits)


def rows_of_two_kinds(comm, output, rows, splits):
    comm.all_to_all(output, rows.half(), splits, splits)


def output_with_gaps(comm, output, rows, splits):
    comm.all_to_all(output.repeat(1, 2)[:, ::2], rows, splits, splits)


def with_gradient(comm, output, rows, splits):
    comm.all_to_all(output, rows.requires_grad_(), splits, splits)


def into_what_requires_gradients(comm, output, rows, splits):
    comm.all_to_all(output.clone().requires_grad_(), rows, splits, splits)


def wants_gradients_alone(comm, output, rows, splits):
    comm.all_to_all(None, rows.requires_grad_(), splits, splits)


def huge_splits_without_output(comm, output, rows, splits):
    comm.all_to_all(None, rows, [1 << 61, 2, 2, 2], splits)


def in_place(comm, output, rows, splits):
    comm.all_to_all(rows, rows, splits, splits)


def unknown_schedule(comm, output, rows, splits):
    comm.all_to_all(output, rows, splits, splits, schedule="best")


def uneven_without_splits(comm, output, rows, splits):
    comm.all_to_all(output, rows[:7], splits)


def splits_of_halves(comm, output, rows, splits):
    comm.all_to_all(output, rows, splits, [2.5, 2, 2, 1.5])


def too_few_splits(comm, output, rows, splits):
    comm.all_to_all(output, rows, splits[:3], splits)


def negative_split(comm, output, rows, splits):
    comm.all_to_all(output, rows, splits, [2, -1, 5, 2])


def splits_of_other_sum(comm, output, rows, splits):
    comm.all_to_all(output, rows, splits, [2, 2, 2, 3])


def make_mistakes(group: dist.ProcessGroup, setup: Setup, mistaken_rank: int, mistakes: list[Call]) -> list[Outcome]:
    """One rank makes mistakes: nothing is written, and after each all collectives work."""
    outcomes = []
    with setup.open(group) as comm:
        for mistake in mistakes:
            rows, output = torch.ones(8, 3), torch.zeros(8, 3)
            call = mistake if comm.rank == mistaken_rank else good
            outcomes.append(attempt(partial(call, comm, output, rows, [2, 2, 2, 2])))
            assert not output.any()
            check_that_it_works(comm, setup)
            good(comm, output, rows.detach(), [2, 2, 2, 2])
            assert output.all()
    return outcomes


def exchange_by_group(group: dist.ProcessGroup) -> Outcome:
    """Call the function without a communicator, twice and after its end, and with one; return the outcome of both."""
    rows = any_bits((2 * dist.get_world_size(group), 3), torch.int32, "by group", dist.get_rank(group))
    expected, output = torch.empty_like(rows), torch.empty_like(rows)
    dist.all_to_all_single(expected, rows, group=group)
    for number in range(3):
        output.zero_()
        if number == 2:
            dist.barrier(group)
            functional._communicator_of(group, rows.device)._session.abandon("fails")  # on all ranks
        fusco.all_to_all(output, rows, group=group)
        assert_same_bits(output, expected, "by group")
    moved = fusco.all_to_all(None, rows.double().requires_grad_(), group=group)
    assert_same_bits(moved.detach(), expected.double(), "by group, with a graph")
    assert moved.requires_grad
    with Setup(ranks_per_node=1).open(group) as comm:
        output.zero_()
        fusco.all_to_all(output, rows, comm=comm, schedule="exact")
        assert_same_bits(output, expected, "by communicator")
        return attempt(lambda: fusco.all_to_all(output, rows, group=group, comm=comm))


def exchange_by_a_destroyed_group(group: dist.ProcessGroup) -> tuple[list[str], list[str]]:
    """Shared memory and watched processes held while a new group exists, and after it is destroyed."""
    new_group = dist.new_group(list(range(dist.get_world_size(group))))
    rows = torch.arange(4)
    fusco.all_to_all(torch.empty_like(rows), rows, group=new_group)
    while_open = held()
    dist.destroy_process_group(new_group)
    del new_group
    gc.collect()
    return while_open, held()
