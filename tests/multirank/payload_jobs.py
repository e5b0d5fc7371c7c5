"""Functions on ranks: payloads of all dtypes, shapes and strides."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from rank_setup import Setup, check_combine, law_of, poison, poison_recycler

import fusco
from comparison import assert_same_bits, world_rows
from generator import any_bits, values


def as_given(x: torch.Tensor) -> torch.Tensor:
    return x


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def every_other_row(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, dim=0)[::2]


def with_gaps(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x, (3, 2))[..., 3:-2]


def expanded(x: torch.Tensor) -> torch.Tensor:
    """Return rows of stride zero: all tokens have the same row."""
    return (x[:1] if len(x) else x.new_zeros(1, *x.shape[1:])).expand(x.shape)


def conjugated(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(x, -x).conj()


def negated(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(x, x).conj().imag


def check_payload(
    group: dist.ProcessGroup,
    setup: Setup,
    shapes: list[tuple[int, ...]],
    dtypes: list[torch.dtype],
    layout: Callable[[torch.Tensor], torch.Tensor] = as_given,
) -> None:
    """Dispatch rows of each shape and dtype with a given memory layout."""
    with setup.open(group) as comm:
        poison_recycler(comm, setup)
        for seed, (shape, dtype) in enumerate((shape, dtype) for shape in shapes for dtype in dtypes):
            case = setup.case("ragged with holes", seed, comm.topology.world_size)
            law = law_of(comm, case)
            x = [layout(any_bits((case.num_tokens(rank), *shape), dtype, seed, "x", rank)) for rank in law.ranks]
            before = x[comm.rank].clone()
            dispatched = comm.dispatch(x[comm.rank], case.topk_idx(comm.rank))
            plain = [rows.resolve_conj().resolve_neg() for rows in x]
            assert_same_bits(dispatched.rows, law.rows(comm.rank, plain), f"{shape} of {dtype}")
            assert dispatched.rows.is_contiguous()
            assert_same_bits(x[comm.rank].resolve_conj().resolve_neg(), before.resolve_conj().resolve_neg(), "x itself")
            poison(dispatched.rows)


def check_several_payloads(group: dist.ProcessGroup, setup: Setup) -> None:
    """Dispatch FP8 values with their scales and a mask, and dispatch them again with the handle."""
    with setup.open(group) as comm:
        poison_recycler(comm, setup)
        for seed in range(6):
            case = setup.case("ragged", seed, comm.topology.world_size)
            law = law_of(comm, case, alignment=4)

            def payloads(rank, seed=seed, case=case):
                num_tokens = case.num_tokens(rank)
                return [
                    any_bits((num_tokens, 33), torch.float8_e4m3fn, seed, "values", rank),
                    any_bits((num_tokens, 2, 3), torch.float32, seed, "scales", rank),
                    any_bits((num_tokens,), torch.bool, seed, "mask", rank),
                ]

            world = [payloads(rank) for rank in law.ranks]
            ids, weights = case.topk_idx(comm.rank), case.topk_weights(comm.rank)
            first = comm.dispatch(world[comm.rank], ids, weights, expert_alignment=4)
            outputs = list(first.payloads)
            for i, output in enumerate(outputs):
                assert_same_bits(output, law.rows(comm.rank, [rows[i] for rows in world]), f"payload {i}")
            handle = first.handle
            poison(*outputs)
            del first, outputs, output
            again = comm.dispatch_again(tuple(world[comm.rank][1:]), handle)
            for i, output in enumerate(again, start=1):
                assert_same_bits(output, law.rows(comm.rank, [rows[i] for rows in world]), f"payload {i} again")


def check_combine_layouts(group: dist.ProcessGroup, setup: Setup, hidden: list[int]) -> None:
    """Combine rows of odd widths, contiguous and not."""
    with setup.open(group) as comm:
        poison_recycler(comm, setup)
        for seed, width in enumerate(hidden):
            case = setup.case("ragged with holes", seed, comm.topology.world_size)
            law, weights = law_of(comm, case, alignment=3), case.world_topk_weights(torch.float64)
            x = torch.zeros(case.num_tokens(comm.rank), 1)
            handle = comm.dispatch(x, case.topk_idx(comm.rank), weights[comm.rank], expert_alignment=3).handle
            for dtype in (torch.float16, torch.float32, torch.float64):
                y = [rows.T.contiguous().T for rows in world_rows(law, width, dtype, seed)]
                poison(check_combine(comm, law, handle, weights, y))


def check_weights(group: dist.ProcessGroup, setup: Setup) -> None:
    """Check the weight of each row, and sums that use it, for every dtype of weights."""
    with setup.open(group) as comm:
        poison_recycler(comm, setup)
        dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
        for seed, dtype in enumerate(dtypes * 2):
            case = setup.case("ragged with holes", seed, comm.topology.world_size)
            law, weights = law_of(comm, case, alignment=5), case.world_topk_weights(dtype)
            x = values((case.num_tokens(comm.rank), 2), torch.float32, seed, "x", comm.rank)
            dispatched = comm.dispatch(
                x, case.topk_idx(comm.rank), weights[comm.rank], expert_alignment=5, with_weights=True
            )
            assert_same_bits(dispatched.weights, law.row_weights(comm.rank, weights), f"weights of {dtype}")
            y = world_rows(law, 3, torch.float32, seed)
            check_combine(comm, law, dispatched.handle, weights, y)
            check_combine(comm, law, dispatched.handle, None, y)
            unweighted: fusco.Handle = comm.dispatch(x, case.topk_idx(comm.rank), expert_alignment=5).handle
            check_combine(comm, law, unweighted, None, y)
