"""Functions on ranks: outputs with a fixed number of rows for each expert."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gradient_jobs import expert_function
from rank_setup import Setup, check_combine, law_of, poison, poison_recycler

import fusco
from comparison import assert_same_bits, assert_within, world_rows
from fusco import StaticRows
from generator import KINDS, Case, any_bits, number_of, values
from law import Law

HIDDEN = 5
_IS_DROPPED = "drop"


class Masked:
    """One dispatch into masked rows, by the specification."""

    def __init__(self, comm: fusco.Communicator, setup: Setup, seed: int) -> None:
        self.comm, self.seed = comm, seed
        self.case: Case = setup.case(KINDS[seed % len(KINDS)], seed, comm.topology.world_size)
        self.alignment = 1 + 2 * (seed % 3 == 1)
        self.rows_per_expert = self.alignment * number_of(1, 4 + 60 * (seed % 2), seed, "rows")
        self.law: Law = law_of(comm, self.case, self.alignment, self.rows_per_expert)
        self.static = StaticRows(rows_per_expert=self.rows_per_expert, on_overflow=_IS_DROPPED)
        self.num_local = len(self.law.counts(comm.rank))
        self.ids, self.weights = self.case.topk_idx(comm.rank), self.case.world_topk_weights()

    def payloads(self, what: str) -> list[list[torch.Tensor]]:
        """Two payloads of every rank."""
        kinds = (((HIDDEN,), torch.bfloat16), ((2, 3), torch.int32))
        return [
            [any_bits((self.case.num_tokens(r), *shape), dtype, self.seed, what, r) for shape, dtype in kinds]
            for r in self.law.ranks
        ]

    def check_rows(self, outputs: tuple[torch.Tensor, ...], x: list[list[torch.Tensor]], what: str) -> None:
        """All rows but those that may be anything."""
        is_defined = ~self.law.undefined(self.comm.rank)
        for p, output in enumerate(outputs):
            expected = self.law.rows(self.comm.rank, [payloads[p] for payloads in x])
            assert output.shape == (self.num_local, self.rows_per_expert, *expected.shape[1:]), what
            assert output.is_contiguous()
            assert output._base is None  # PyTorch treats views differently
            assert_same_bits(output.flatten(0, 1)[is_defined], expected[is_defined], f"{what} of {self.case}")

    def in_shape(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows by slot, in the shape of the output."""
        return rows.view(self.num_local, self.rows_per_expert, *rows.shape[1:])

    def check_counts(self, sent: fusco.Dispatched) -> None:
        """Counts of rows here, needed and dropped."""
        law, rank = self.law, self.comm.rank
        assert sent.num_rows_per_expert.tolist() == law.counts(rank)
        assert sent.num_dropped_per_expert.tolist() == law.num_dropped(rank)
        assert (sent.num_dropped_per_expert.dtype, sent.num_rows_needed.dtype) == (torch.int32, torch.int32)
        assert sent.num_rows_needed.tolist() == [max(map(len, law.wanted(rank)), default=0)]
        assert sent.handle.num_rows == self.num_local * self.rows_per_expert
        assert sent.handle.rows_shape == (self.num_local, self.rows_per_expert)


def check_masked(group: dist.ProcessGroup, setup: Setup, seeds: range) -> None:
    """Dispatch, dispatch again and combine rows and weights, of which some are dropped."""
    with setup.open(group) as comm:
        if setup.device == "cpu":
            poison_recycler(comm, setup)
        for seed in seeds:
            of, rank = Masked(comm, setup, seed), comm.rank
            x, others = of.payloads("x"), of.payloads("other x")
            sent = comm.dispatch(
                x[rank], of.ids, of.weights[rank], expert_alignment=of.alignment, with_weights=True, static=of.static
            )
            of.check_rows(sent.payloads, x, "dispatch")
            of.check_counts(sent)
            expected = of.law.row_weights(rank, of.weights)
            assert_same_bits(sent.weights, of.in_shape(expected), f"weights of {of.case}")
            again = comm.dispatch_again(others[rank], sent.handle)
            of.check_rows(again, others, "dispatch_again")
            y = world_rows(of.law, HIDDEN, torch.bfloat16, seed)
            flat = check_combine(comm, of.law, sent.handle, of.weights, y)
            y[rank] = of.in_shape(y[rank])
            assert_same_bits(comm.combine(y[rank], sent.handle), flat, "masked rows and the same by slot")
            _check_others(of, sent, y)
            poison(*sent.payloads, *again, flat)


def _check_others(of: Masked, sent: fusco.Dispatched, y: list[torch.Tensor]) -> None:
    """``combine_all`` and ``combine_weights``."""
    comm, rank = of.comm, of.comm.rank
    y = [rows.flatten(0, 1) if rows.ndim == 3 else rows for rows in y]
    wide = [rows.float()[:, :, None] * torch.ones(2) for rows in y]
    sums, cubes = comm.combine_all([of.in_shape(y[rank]), of.in_shape(wide[rank])], sent.handle)
    assert_same_bits(sums, comm.combine(y[rank], sent.handle, weights=None), "combine_all")
    exact = of.law.sums(rank, [rows.flatten(1) for rows in wide], None, of.law.ranks)
    bound = of.law.error_bound(exact, torch.float32, None, num_hops=2)
    assert cubes.shape == (of.case.num_tokens(rank), HIDDEN, 2)
    assert_within(cubes.flatten(1), exact.exact, bound, "cubes")
    weights = of.weights[rank]
    of_rows = comm.dispatch_weights(weights, sent.handle)
    assert_same_bits(torch.where(sent.weights == 0, 0.0, of_rows), sent.weights, "dispatch_weights")
    returned = comm.combine_weights(of.in_shape(of.law.row_weights(rank, of.weights)), sent.handle)
    kept = {(p.token, p.k) for owner in of.law.ranks for p in of.law.slots(owner) if p and p.src == rank}
    is_kept = torch.zeros(weights.shape, dtype=torch.bool)
    for pair in kept:
        is_kept[pair] = True
    assert_same_bits(returned, torch.where(is_kept, weights, 0.0), "combine_weights")


def check_gradients(group: dist.ProcessGroup, setup: Setup, seeds: range, weighted_by: str) -> None:
    """A layer on masked rows has the outputs and gradients of one in which the dropped pairs have no expert."""
    with setup.open(group) as comm:
        for seed in seeds:
            of = Masked(comm, setup, seed)
            kept = {(p.token, p.k) for owner in of.law.ranks for p in of.law.slots(owner) if p and p.src == comm.rank}
            ids = of.ids.clone()
            for token, k in ids.nonzero().tolist() + (ids == 0).nonzero().tolist():
                if (token, k) not in kept:
                    ids[token, k] = -1
            masked = _layer(of, of.ids, of.static, weighted_by)
            exact = _layer(of, ids, None, weighted_by)
            for name, seen in masked.items():
                assert_same_bits(seen, exact[name], f"{name} of {of.case}")


def _layer(of: Masked, ids: torch.Tensor, static: StaticRows | None, weighted_by: str) -> dict[str, torch.Tensor]:
    comm, rank = of.comm, of.comm.rank
    x = values((len(ids), HIDDEN), torch.float64, of.seed, "x", rank).requires_grad_()
    weights = of.case.topk_weights(rank, torch.float64).requires_grad_()
    of_experts = weighted_by == "experts"
    sent = comm.dispatch(
        x, ids, weights, expert_alignment=of.alignment if static else 1, with_weights=of_experts, static=static
    )
    if static:  # as a masked product: rows behind an expert's last one are not read, and what it writes is undefined
        position = torch.arange(of.rows_per_expert)
        is_row = position[None, :] < sent.num_rows_per_expert[:, None]
        rows = torch.full(sent.rows.shape, float("nan"), dtype=torch.float64)
    else:
        is_row, rows = torch.ones(len(sent.rows), dtype=torch.bool), torch.empty_like(sent.rows)
    of_row = torch.arange(of.num_local).repeat_interleave(sent.num_rows_per_expert)
    made = expert_function(of_row, sent.rows[is_row])
    if of_experts:
        made = made * sent.weights[is_row][:, None]
    y = rows.masked_scatter(is_row[..., None].expand(rows.shape), made)
    out = comm.combine(y, sent.handle, weights=None if of_experts else "topk")
    (out * values(out.shape, torch.float64, of.seed, "cotangent", rank)).sum().backward()
    return {"out": out.detach(), "x.grad": x.grad, "weights.grad": weights.grad}


def _dispatch_and_wait(comm: fusco.Communicator, x: torch.Tensor, topk_idx: torch.Tensor, static: StaticRows) -> None:
    comm.dispatch(x, topk_idx, static=static)
    comm.synchronize()  # on CUDA no host waits for the plan before


def check_overflow(group: dist.ProcessGroup, setup: Setup) -> None:
    """Ranks whose experts need more rows raise, with the expert, and all go on."""
    with setup.open(group) as comm:
        case = setup.case("ragged with holes", 3, comm.topology.world_size, 4)
        law = law_of(comm, case, rows_per_expert=2)
        x = torch.ones(case.num_tokens(comm.rank), HIDDEN)
        wanted = list(map(len, law.wanted(comm.rank)))
        for _ in range(2):
            if max(wanted) > 2:
                with pytest.raises(fusco.RowOverflowError, match=r"StaticRows\(rows_per_expert=2\)") as raised:
                    _dispatch_and_wait(comm, x, case.topk_idx(comm.rank), StaticRows(rows_per_expert=2))
                error = raised.value
                expert = wanted.index(max(wanted))
                assert (error.num_rows, error.num_rows_needed, error.local_expert) == (2, wanted[expert], expert)
                words = f"rank {comm.rank} needed {max(wanted)} rows for its local expert {expert}"
                assert words in str(error)
            else:
                comm.dispatch(x, case.topk_idx(comm.rank), static=StaticRows(rows_per_expert=2))
        exact = comm.dispatch(x, case.topk_idx(comm.rank))
        assert exact.num_rows_per_expert.tolist() == wanted
