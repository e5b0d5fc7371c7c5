"""Functions on ranks: routings of all kinds, dispatched and combined."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from rank_setup import Setup, check_combine, digest, law_of, pause_randomly, poison, poison_recycler

from comparison import assert_same_bits, world_rows
from fusco.rails.rail import Rail
from generator import KINDS, any_bits

HIDDEN = 5


def check_routings(
    group: dist.ProcessGroup, setup: Setup, dtype: torch.dtype, seeds: range, longest_pause_ms: int = 0
) -> list[tuple[str, str]]:
    """Dispatch and combine a case for each seed, kinds in turn; return digests of both outputs of this rank."""
    digests = []
    with setup.open(group) as comm:
        poison_recycler(comm, setup)
        for seed in seeds:
            case = setup.case(KINDS[seed % len(KINDS)], seed, comm.topology.world_size)
            try:
                digests.append(_check_case(comm, setup, case, dtype, longest_pause_ms))
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from error
    return digests


def check_routings_on_hosts(
    group: dist.ProcessGroup, setup: Setup, dtype: torch.dtype, seeds: range, hosts: list[str]
) -> tuple[int, ...]:
    """``check_routings`` with the given host of each rank; return the resulting node of each rank."""
    with mock.patch("fusco.control.bootstrap.host_identity", return_value=hosts[dist.get_rank(group)]):
        check_routings(group, setup, dtype, seeds)
        with setup.open(group) as comm:
            return comm.topology.rank_to_node


def bytes_sent_with_rails(group: dist.ProcessGroup, setup: Setup, num_rails: int) -> list[int]:
    """Dispatch and combine on hosts of ``num_rails`` NICs; return this rank's bytes to nodes, also of an all-to-all."""
    rails = tuple(Rail(f"rail{index}", f"127.0.0.{index + 1}", (index,)) for index in range(num_rails))
    with mock.patch("fusco.api.create.configured_rails", return_value=rails), setup.open(group) as comm:
        case = setup.case("balanced", 0, comm.topology.world_size, setup.num_topk)
        law = law_of(comm, case)
        x = [any_bits((case.num_tokens(rank), HIDDEN), torch.float32, "x", rank) for rank in law.ranks]
        dispatched = comm.dispatch(x[comm.rank], case.topk_idx(comm.rank), case.topk_weights(comm.rank))
        num_bytes = [comm.profile.internode_row_bytes]
        assert_same_bits(dispatched.rows, law.rows(comm.rank, x), "dispatch")
        y = world_rows(law, HIDDEN, torch.float32, 0)
        check_combine(comm, law, dispatched.handle, case.world_topk_weights(), y)
        sent = torch.arange(1200 * comm.topology.world_size).view(-1, 1200) + 10_000 * comm.rank
        received = comm.all_to_all(None, sent)
        expected = [torch.arange(1200) + 1200 * comm.rank + 10_000 * rank for rank in law.ranks]
        assert_same_bits(received, torch.stack(expected), "all_to_all")
        return [*num_bytes, comm.profile.internode_row_bytes]


def _check_case(comm, setup, case, dtype, longest_pause_ms):
    law = law_of(comm, case)
    x = [any_bits((case.num_tokens(rank), HIDDEN), dtype, case.seed, "x", rank) for rank in law.ranks]
    ids = case.topk_idx(comm.rank).to(torch.int32 if case.seed % 2 else torch.int64)

    pause_randomly(comm.rank, case.seed, longest_pause_ms)
    dispatched = comm.dispatch(x[comm.rank], ids, case.topk_weights(comm.rank))
    assert_same_bits(dispatched.rows, law.rows(comm.rank, x), "dispatch")
    assert dispatched.num_rows_per_expert.tolist() == law.counts(comm.rank)
    assert dispatched.weights is None
    assert len(dispatched.payloads) == 1

    pause_randomly(comm.rank, -case.seed, longest_pause_ms)
    y = world_rows(law, HIDDEN, dtype, case.seed)
    out = check_combine(comm, law, dispatched.handle, case.world_topk_weights(), y, setup.settings.wire_dtype)
    fingerprints = digest(dispatched.rows), digest(out)
    poison(dispatched.rows, out)
    return fingerprints
