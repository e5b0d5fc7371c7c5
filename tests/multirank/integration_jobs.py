"""Functions on ranks: the calls of frameworks to DeepEP's and HybridEP's buffers, against the specification."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deep_ep_jobs import finds_a_fault_of_version_1
from integration_cases import HIDDEN, KINDS, NUM_LOCAL, cases, law_of
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from comparison import assert_same_bits
from fusco import ClosedError, PeerFailureError
from fusco.api import communicator
from fusco.api.collective import run_collective
from fusco.integrations.deep_ep_buffer import Buffer, Config
from fusco.integrations.elastic_buffer import ElasticBuffer
from fusco.integrations.hybrid_ep import HybridEPBuffer
from fusco.integrations.routing_maps import indices_to_map
from generator import Case, any_bits, values
from law import Law


def open_hybrid(group: dist.ProcessGroup, ranks_per_node: int) -> HybridEPBuffer:
    """As Megatron makes it, with the tokens of a small first call."""
    return HybridEPBuffer(
        group=group,
        hidden_dim=HIDDEN,
        max_num_of_tokens_per_rank=4,
        num_local_experts=NUM_LOCAL,
        use_fp8=False,
        num_of_hybrid_ep_ranks_per_nvlink_domain=ranks_per_node,
    )


def check_hybrid_ep(group: dist.ProcessGroup, ranks_per_node: int, pad_multiple: int | None) -> None:
    """Dispatch, combine, and both backward passes as Megatron and Automodel call them; maps and indices."""
    check_hybrid_buffer(group, open_hybrid(group, ranks_per_node), pad_multiple)


def check_hybrid_buffer(group: dist.ProcessGroup, buffer: HybridEPBuffer, pad_multiple: int | None) -> None:
    """Compare everything that a buffer returns with the specification."""
    rank = group.rank()
    for case in cases(group.size()):
        law = law_of(case, pad_multiple or 1)
        x = [values((case.num_tokens(r), HIDDEN), torch.float32, case.seed, "x", r) for r in law.ranks]
        ids, weights = case.topk_idx(rank), case.topk_weights(rank)
        routing_map, probs = indices_to_map(ids, weights, len(ids), case.num_experts)
        by_map = {"routing_map": routing_map} if case.seed % 2 else {"topk_idx": ids, "routing_map": None}
        rows, row_probs, scales, counts, handle = buffer.dispatch_with_permute(
            hidden=x[rank],
            probs=probs,
            scaling_factor=None,
            num_of_experts_per_rank=NUM_LOCAL,
            pad_multiple=pad_multiple,
            num_permuted_tokens=None,
            non_blocking=False,
            **by_map,
        )
        assert scales is None
        assert_same_bits(rows, law.rows(rank, x), "rows")
        padded = [len(block) + -len(block) % (pad_multiple or 1) for block in law.blocks(rank)]
        assert counts.tolist() == padded
        assert counts.device.type == "cpu"
        assert len(handle) == 11
        assert int(handle[-1]) == 0
        given = case.world_topk_weights()
        of_pairs = [0.0 if pair is None else float(given[pair.src][pair.token, pair.k]) for pair in law.slots(rank)]
        torch.testing.assert_close(row_probs, torch.tensor(of_pairs), rtol=0, atol=0)
        check_hybrid_backward(buffer, law, case, handle, counts)


def check_hybrid_backward(buffer: HybridEPBuffer, law: Law, case: Case, handle: tuple, counts: torch.Tensor) -> None:
    """Combine, its backward (a dispatch along the handle), and dispatch's backward (a combine with values)."""
    rank = buffer.rank
    y = [values((len(law.slots(r)), HIDDEN), torch.float32, case.seed, "y", r) for r in law.ranks]
    out, none = buffer.combine_with_unpermute(hidden=y[rank], handle=handle, pad_multiple=None)
    assert none is None
    torch.testing.assert_close(out.double(), law.sums(rank, y, None, law.ranks).exact, rtol=1e-5, atol=1e-5)
    grad = [values((case.num_tokens(r), HIDDEN), torch.float32, case.seed, "grad", r) for r in law.ranks]
    again, row_probs, _, counts_again, _ = buffer.dispatch_with_permute(
        hidden=grad[rank], scaling_factor=None, handle=handle, pad_multiple=None, num_permuted_tokens=counts.sum()
    )
    assert row_probs is None
    assert counts_again.tolist() == counts.tolist()
    assert_same_bits(again, law.rows(rank, grad), "the gradients of combine")
    # Gradients may be non-contiguous.
    row_values = [values((len(law.slots(r)), 2), torch.float32, case.seed, "values", r) for r in law.ranks]
    _, of_tokens = buffer.combine_with_unpermute(
        hidden=y[rank].T.contiguous().T, probs=row_values[rank][:, 1], handle=handle
    )
    expected = torch.zeros(case.num_tokens(rank), case.num_experts)
    for owner in law.ranks:
        for pair, value in zip(law.slots(owner), row_values[owner][:, 1], strict=True):
            if pair and pair.src == rank:
                expected[pair.token, case.topk_idx(rank)[pair.token, pair.k]] = value
    torch.testing.assert_close(of_tokens, expected, rtol=0, atol=0)


def finds_a_fault(group: dist.ProcessGroup, tamper: str) -> bool:
    """Return whether the check fails on this rank for a buffer with a fault; a rank that fails leaves the others."""
    buffer = open_hybrid(group, group.size())
    if tamper.startswith("version 1"):
        return finds_a_fault_of_version_1(group, tamper)
    dispatch, combine = buffer.dispatch_with_permute, buffer.combine_with_unpermute

    def faulty_dispatch(**arguments: object) -> tuple:
        rows, *rest = dispatch(**arguments)
        if len(rows) > 2 and tamper == "drop a token":
            rows[1] = 0
        if len(rows) > 2 and tamper == "swap two rows of an expert":
            rows[:2] = rows[:2].flip(0)
        return rows, *rest

    def faulty_combine(**arguments: object) -> tuple:
        sums, values_ = combine(**arguments)
        return sums, values_ if values_ is None else torch.zeros_like(values_)

    buffer.dispatch_with_permute = faulty_dispatch
    if tamper == "forget the gradients of weights":
        buffer.combine_with_unpermute = faulty_combine
    try:
        check_hybrid_buffer(group, buffer, None)
    except AssertionError:
        return True
    except PeerFailureError:
        return False
    finally:
        buffer.abort()
    return False


def check_rank_rows(group: dist.ProcessGroup, ranks_per_node: int) -> None:
    """HybridEP's dispatch without permutation: one row for each token and rank, between nodes as well."""
    rank, buffer = group.rank(), open_hybrid(group, ranks_per_node)
    for case in cases(group.size(), KINDS[:3]):
        ids, weights = case.topk_idx(rank), case.topk_weights(rank)
        x = [values((case.num_tokens(r), HIDDEN), torch.float32, case.seed, "x", r) for r in range(group.size())]
        rows, of_node, _, handle = buffer.dispatch(
            x[rank], topk_idx=ids, topk_weights=weights, num_of_experts=case.num_experts
        )
        arrived = [
            (src, token)
            for src in range(group.size())
            for token, experts in enumerate(case.topk_idx(src).tolist())
            if any(expert // NUM_LOCAL == rank for expert in experts if expert >= 0)
        ]
        assert_same_bits(rows, torch.stack([x[src][token] for src, token in arrived]) if arrived else rows, "rows")
        assert int(handle[3]) == len(arrived)
        assert handle[4].sum(1).tolist() == [
            int((case.topk_idx(src)[token] // NUM_LOCAL == rank).sum()) for src, token in arrived
        ]
        out, of_tokens = buffer.combine(rows, of_node, handle)
        num_copies = Buffer(group).get_dispatch_layout(ids, case.num_experts)[3].sum(1, keepdim=True)
        torch.testing.assert_close(out, x[rank] * num_copies, rtol=1e-5, atol=1e-5)
        expected = indices_to_map(ids, weights, len(ids), case.num_experts)[1]
        torch.testing.assert_close(of_tokens, expected, rtol=0, atol=0)


def leave_open(group: dist.ProcessGroup) -> None:
    """Use buffers that nothing closes, as frameworks do, and let the process end."""
    x, ids = torch.ones(2, HIDDEN), torch.zeros(2, 1, dtype=torch.int64)
    hybrid, elastic = open_hybrid(group, group.size()), ElasticBuffer(group)
    hybrid.dispatch_with_permute(hidden=x, topk_idx=ids)
    elastic.dispatch(x, topk_idx=ids, num_experts=group.size(), do_expand=True)
    _LEFT_OPEN.extend([hybrid, elastic])


_LEFT_OPEN: list[object] = []


def check_replay(group: dist.ProcessGroup) -> None:
    """Recomputation as in Automodel: the handle of the forward pass with weights, whose rows come back."""
    rank, buffer = group.rank(), open_hybrid(group, group.size())
    (case,) = cases(group.size(), ["ragged with holes"])
    ids = case.topk_idx(rank)
    x = values((len(ids), HIDDEN), torch.bfloat16, "x", rank)
    _, probs = indices_to_map(ids, case.topk_weights(rank), len(ids), case.num_experts)
    first = buffer.dispatch_with_permute(hidden=x, topk_idx=ids, probs=probs, num_of_experts=case.num_experts)
    again = buffer.dispatch_with_permute(hidden=x, probs=probs, handle=first[4])
    assert_same_bits(again[0], first[0], "rows")
    assert_same_bits(again[1], first[1], "weights")


class Ops(TorchDispatchMode):
    """Counts operations, without views, outside of collectives: on CUDA each launches a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ops = self.num_collectives = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(of.alias_info and not of.alias_info.is_write for of in function._schema.returns):
            self.num_ops += 1
        return function(*args, **(kwargs or {}))

    def run_collective(self, *given: Any) -> Any:
        self.num_collectives += 1
        with _disable_current_modes():
            return run_collective(*given)


def count_ops(call: Callable[[], Any]) -> tuple[int, int]:
    """Return the operations and the collectives of a call that has been made before."""
    call()
    with Ops() as ops, mock.patch.object(communicator, "run_collective", ops.run_collective):
        call()
    return ops.num_ops, ops.num_collectives


def ops_along_handles(group: dist.ProcessGroup) -> dict[str, tuple[int, int]]:
    """Operations and collectives of each call along a handle, from its second time on."""
    rank, hybrid, buffer = group.rank(), open_hybrid(group, group.size()), Buffer(group)
    (case,) = cases(group.size(), ["balanced"])
    ids, weights, num_experts = case.topk_idx(rank), case.topk_weights(rank), case.num_experts
    x = values((len(ids), HIDDEN), torch.bfloat16, "x", rank)
    _, probs = indices_to_map(ids, weights, len(ids), num_experts)
    rows, of_rows, _, of_ranks = hybrid.dispatch(x, topk_idx=ids, topk_weights=weights, num_of_experts=num_experts)
    permuted, of_permuted, _, _, of_experts = hybrid.dispatch_with_permute(hidden=x, topk_idx=ids, probs=probs)
    *_, per_expert, is_in, _ = buffer.get_dispatch_layout(ids, num_experts)
    first, _, _, _, handle, _ = buffer.dispatch(
        x, topk_idx=ids, topk_weights=weights, is_token_in_rank=is_in, num_tokens_per_expert=per_expert
    )
    calls = {
        "dispatch": lambda: hybrid.dispatch(x, topk_weights=weights, handle=of_ranks),
        "combine": lambda: hybrid.combine(rows, of_rows, of_ranks),
        "dispatch_with_permute": lambda: hybrid.dispatch_with_permute(hidden=x, probs=probs, handle=of_experts),
        "combine_with_unpermute": lambda: hybrid.combine_with_unpermute(
            hidden=permuted, probs=of_permuted, handle=of_experts
        ),
        "version 1: dispatch": lambda: buffer.dispatch(x, handle=handle),
        "version 1: combine": lambda: buffer.combine(first, handle),
    }
    return {name: count_ops(call) for name, call in calls.items()}


def check_other_weights_along_handles(group: dist.ProcessGroup) -> None:
    """A handle serves calls with other weights and values; on a communicator with room for weights and without."""
    rank, hybrid, elastic = group.rank(), open_hybrid(group, group.size()), ElasticBuffer(group)
    (case,) = cases(group.size(), ["ragged with holes"])
    ids, num_experts = case.topk_idx(rank), case.num_experts
    x = values((len(ids), HIDDEN), torch.bfloat16, "x", rank)
    given = [case.topk_weights(rank) * factor for factor in (1, 2, 4)]
    dense = [indices_to_map(ids, weights, len(ids), num_experts)[1] for weights in given]
    rows, of_node, _, handle = hybrid.dispatch(x, topk_idx=ids, topk_weights=given[0], num_of_experts=num_experts)
    permuted, of_permuted, *_, of_experts = hybrid.dispatch_with_permute(hidden=x, topk_idx=ids, probs=dense[0])
    _, _, of_expanded, expanded, _ = elastic.dispatch(
        x, topk_idx=ids, topk_weights=given[0], num_experts=num_experts, do_expand=True
    )
    full = (replace(of_experts[0], max_bytes_per_token=0), *of_experts[1:])
    for factor, weights, probs in zip((1, 2, 4), given, dense, strict=True):
        for by in ({"topk_weights": weights}, {"probs": probs}):
            again, other, _, same = hybrid.dispatch(x, handle=handle, **by)
            assert same is handle
            assert_same_bits(again, rows, "rows")
            assert_same_bits(other, of_node * factor, "weights of rows by expert")
        noise = torch.where(other == 0, float("nan"), other)  # values of experts that a row was not sent for
        assert_same_bits(hybrid.combine(rows, noise, handle)[1].contiguous(), probs, "weights of tokens")
        for each in (of_experts, full):
            again, other, *_ = hybrid.dispatch_with_permute(hidden=x, probs=probs, handle=each)
            assert_same_bits(again, permuted, "rows")
            assert_same_bits(other, of_permuted * factor, "weights of rows")
            _, of_tokens = hybrid.combine_with_unpermute(hidden=permuted, probs=other, handle=each)
            assert_same_bits(of_tokens, probs, "weights of tokens")
        other = elastic.dispatch(x, topk_weights=weights, handle=expanded)[2]
        assert_same_bits(other, of_expanded * factor, "weights of expanded rows")
    assert hybrid.dispatch(x, handle=handle)[1] is None
    # Of fewer experts a token than the communicator has room for, and of other negative ids for none.
    few = {"topk_weights": given[0][:, :1]}
    _, first, *_, of_few = hybrid.dispatch_with_permute(hidden=x, topk_idx=ids[:, :1], **few)
    assert_same_bits(hybrid.dispatch_with_permute(hidden=x, handle=of_few, **few)[1], first, "weights of few experts")
    none = torch.where(ids < 0, -2, ids)
    _, of_node, _, handle = hybrid.dispatch(x, topk_idx=none, topk_weights=given[0], num_of_experts=num_experts)
    assert_same_bits(hybrid.combine(rows, of_node, handle)[1].contiguous(), dense[0], "weights of tokens")


def check_layers_with_different_experts(group: dist.ProcessGroup) -> None:
    """One buffer, as Megatron has it, for layers with 3, 5 and 1 experts a rank; backward passes in reverse order."""
    rank, buffer = group.rank(), open_hybrid(group, group.size())
    layers = []
    for num_local in (NUM_LOCAL, 5, 1):
        num_experts = num_local * group.size()
        ids = torch.arange(12).view(6, 2).add(rank) % num_experts
        weights = values((6, 2), torch.float32, "weights", rank, num_local)
        routing_map, probs = indices_to_map(ids, weights, 6, num_experts)
        x = values((6, HIDDEN), torch.float32, "x", rank, num_local)
        rows, row_probs, _, counts, handle = buffer.dispatch_with_permute(
            hidden=x, routing_map=routing_map, probs=probs, num_of_experts_per_rank=num_local
        )
        assert len(counts) == num_local
        layers.append((x, routing_map, probs, rows, row_probs, handle))
        sent = buffer.dispatch(hidden=x, topk_idx=ids, topk_weights=weights, num_of_experts=num_experts)
        assert sent[3][4].shape[1] == num_local
        _, of_tokens = buffer.combine(sent[0], sent[1], sent[3])
        assert_same_bits(of_tokens, probs, "weights")
    for x, routing_map, probs, rows, row_probs, handle in reversed(layers):
        sums, of_tokens = buffer.combine_with_unpermute(hidden=rows, probs=row_probs, handle=handle)
        torch.testing.assert_close(sums, x * routing_map.sum(1, keepdim=True))
        assert_same_bits(of_tokens, probs, "weights")


def check_fp8(group: dist.ProcessGroup) -> None:
    """Rows of bytes with float32 scales; results come back in bfloat16, twice as wide."""
    rank, buffer = group.rank(), open_hybrid(group, group.size())
    (case,) = cases(group.size(), ["balanced"])
    law = law_of(case, 8)
    x = [any_bits((case.num_tokens(r), HIDDEN), torch.uint8, "x", r) for r in law.ranks]
    scales = [values((case.num_tokens(r), HIDDEN // 128), torch.float32, "scales", r) for r in law.ranks]
    column_major = scales[rank].T.contiguous().T
    rows, _, row_scales, _, handle = buffer.dispatch_with_permute(
        hidden=x[rank], topk_idx=case.topk_idx(rank), scaling_factor=column_major, pad_multiple=8
    )
    assert_same_bits(rows, law.rows(rank, x), "rows")
    assert_same_bits(row_scales, law.rows(rank, scales), "scales")
    sums, _ = buffer.combine_with_unpermute(hidden=rows.bfloat16(), handle=handle)
    assert sums.shape == x[rank].shape


def check_static_rows(group: dist.ProcessGroup) -> None:
    """``non_blocking``: as many rows as asked for, counts that stay on the device, and a flag of what was dropped."""
    rank, buffer = group.rank(), open_hybrid(group, group.size())
    (case,) = cases(group.size(), ["balanced"])
    law, ids = law_of(case, 4), case.topk_idx(rank)
    x = [values((case.num_tokens(r), HIDDEN), torch.float32, "x", r) for r in law.ranks]
    expected, num_needed = law.rows(rank, x), len(law.slots(rank))
    for num_rows in (200, num_needed, num_needed // 8 * 4):
        rows, _, _, counts, handle = buffer.dispatch_with_permute(
            hidden=x[rank], topk_idx=ids, pad_multiple=4, num_permuted_tokens=num_rows, non_blocking=True
        )
        assert len(rows) == num_rows
        assert_same_bits(rows[:num_needed], expected[:num_rows], "rows")
        assert int(counts.sum()) == min(num_rows, num_needed)
        assert (handle[-1].tolist(), handle[-1].dtype) == ([int(num_rows < num_needed)], torch.int32)


def refusals(group: dist.ProcessGroup) -> list[str]:
    """Return the texts of errors; the buffer works afterwards."""
    buffer = open_hybrid(group, group.size())
    x, ids = torch.ones(2, HIDDEN), torch.zeros(2, 2, dtype=torch.int64)
    texts = []
    for call in (
        lambda: buffer.dispatch_with_permute(hidden=x),
        lambda: buffer.dispatch_with_permute(hidden=x, topk_idx=ids, num_of_experts=5),
        lambda: buffer.dispatch_with_permute(hidden=x, topk_idx=ids, non_blocking=True),
        lambda: buffer.dispatch_with_permute(hidden=x, topk_idx=ids - 2 * (group.rank() == 0)),
        lambda: buffer.combine_with_unpermute(hidden=x),
        lambda: Buffer(group, low_latency_mode=True),
        lambda: Buffer(group).low_latency_dispatch(x),
    ):
        try:
            call()
        except (ValueError, TypeError, NotImplementedError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    buffer.dispatch_with_permute(hidden=x, topk_idx=ids)
    buffer.abort()
    with pytest.raises(ClosedError, match="have been aborted"):
        buffer.dispatch_with_permute(hidden=x, topk_idx=ids)
    return texts


def mistakes_of_one_rank(group: dist.ProcessGroup) -> list[tuple[str, float]]:
    """Rank 1 makes a mistake before each call of rank 0; return the text of each error, and how long the call took."""
    x, ids = torch.ones(3, HIDDEN), torch.arange(6).view(3, 2) % (NUM_LOCAL * 2)
    weights = torch.ones(3, 2)
    first, second, hybrid = Buffer(group), ElasticBuffer(group), open_hybrid(group, 2)
    outcomes = []

    def attempt(right: Callable[[], Any], wrong: Callable[[], Any]) -> None:
        begin = time.monotonic()
        with pytest.raises((ValueError, TypeError, NotImplementedError, RuntimeError)) as raised:
            (wrong if group.rank() == 1 else right)()
        outcomes.append((f"{type(raised.value).__name__}: {raised.value}", time.monotonic() - begin))

    *_, of_experts, is_in, _ = first.get_dispatch_layout(ids, NUM_LOCAL * 2)

    def send(**changes: Any) -> Any:
        routing = {"is_token_in_rank": is_in, "num_tokens_per_expert": of_experts, "topk_idx": ids}
        return first.dispatch(x, **{**routing, "topk_weights": weights, **changes})

    def expand(**changes: Any) -> Any:
        options = {"topk_idx": ids, "num_experts": NUM_LOCAL * 2, "do_expand": True, **changes}
        return second.dispatch(x, **options)

    def permute(**changes: Any) -> Any:
        return hybrid.dispatch_with_permute(**{"hidden": x, "topk_idx": ids, "topk_weights": weights, **changes})

    # First with no communicator, then with one: before a dispatch, and along a handle.
    attempt(send, lambda: send(is_token_in_rank=None))
    rows, *_, handle, _ = send()
    attempt(send, lambda: send(is_token_in_rank=is_in[:2]))
    attempt(lambda: first.combine(rows, handle), lambda: first.combine(rows, (None, None)))
    attempt(expand, lambda: expand(num_experts=None))
    expanded, _, _, of_second, _ = expand()
    attempt(expand, lambda: expand(do_expand=False))
    attempt(lambda: second.combine(expanded, of_second), lambda: second.combine(expanded, None))
    values = torch.ones(len(expanded))
    attempt(
        lambda: second.combine(expanded, of_second, topk_weights=values),
        lambda: second.combine(expanded, of_second, topk_weights=values[1:]),
    )
    attempt(permute, lambda: permute(topk_idx=None))
    permuted, *_, of_hybrid = permute()
    attempt(permute, lambda: permute(num_of_experts=5))
    attempt(
        lambda: hybrid.combine_with_unpermute(hidden=permuted, handle=of_hybrid),
        lambda: hybrid.combine_with_unpermute(hidden=permuted),
    )
    # Along a handle of an earlier communicator than the latest.
    many = 9
    first.dispatch(x.repeat(many, 1), is_token_in_rank=is_in.repeat(many, 1), num_tokens_per_expert=many * of_experts)
    second.dispatch(x.repeat(many, 1), topk_idx=ids.repeat(many, 1), num_experts=NUM_LOCAL * 2, do_expand=True)
    too_few = Config(num_sms=-1)
    attempt(lambda: first.dispatch(x, handle), lambda: first.dispatch(x, handle, config=too_few))
    attempt(lambda: first.combine(rows, handle), lambda: first.combine(rows, handle, config=too_few))
    attempt(
        lambda: second.dispatch(x, handle=of_second),
        lambda: second.dispatch(x, handle=of_second, use_tma_aligned_col_major_sf=True),
    )
    assert torch.equal(first.combine(rows, handle)[0], x * is_in.sum(1, keepdim=True))  # all of them work
    assert torch.equal(second.combine(expanded, of_second)[0], 2 * x)
    assert torch.equal(hybrid.combine_with_unpermute(hidden=permuted, handle=of_hybrid)[0], 2 * x)
    for buffer in (first, second):
        buffer.destroy()
    hybrid.abort()
    return outcomes


def under_default_device(group: dist.ProcessGroup) -> None:
    """Models are built under a default device of "meta", and run in bfloat16 by default."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            run_hybrid_ep(group)
    finally:
        torch.set_default_dtype(dtype)


def run_hybrid_ep(group: dist.ProcessGroup) -> None:
    """One layer with identity for experts, on tensors that name their device."""
    ids = torch.tensor([[0, NUM_LOCAL * group.size() - 1]], device="cpu")
    x = torch.full((1, HIDDEN), float(group.rank()), dtype=torch.float32, device="cpu")
    made = (open_hybrid(group, group.size()), Buffer(group), ElasticBuffer(group))
    for buffer, call in zip(made, (_through_hybrid_ep, _through_deep_ep, _through_elastic), strict=True):
        torch.testing.assert_close(call(buffer, x, ids), 2 * x)


def _through_hybrid_ep(buffer: HybridEPBuffer, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    probs = torch.ones(1, NUM_LOCAL * buffer.group_size, device="cpu")
    rows, row_probs, *_, handle = buffer.dispatch_with_permute(hidden=x, topk_idx=ids, probs=probs)
    return buffer.combine_with_unpermute(hidden=rows, probs=row_probs, handle=handle)[0]


def _through_deep_ep(buffer: Buffer, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    weights = torch.ones(ids.shape, dtype=torch.float32, device="cpu")
    *_, per_expert, is_in, _ = buffer.get_dispatch_layout(ids, NUM_LOCAL * buffer.group_size)
    rows, _, row_weights, _, handle, _ = buffer.dispatch(
        x, topk_idx=ids, topk_weights=weights, is_token_in_rank=is_in, num_tokens_per_expert=per_expert
    )
    return buffer.combine(rows, handle, row_weights)[0]


def _through_elastic(buffer: ElasticBuffer, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    weights = torch.ones(ids.shape, dtype=torch.float32, device="cpu")
    num_experts = NUM_LOCAL * buffer.num_ranks
    rows, _, _, handle, _ = buffer.dispatch(
        x, topk_idx=ids, topk_weights=weights, num_experts=num_experts, do_expand=True
    )
    return buffer.combine(rows, handle)[0]


def killed_in_a_layer(group: dist.ProcessGroup) -> str:
    """The last rank leaves in the middle of a layer; the others name it."""
    buffer = open_hybrid(group, group.size())
    x, ids = torch.ones(2, HIDDEN), torch.arange(2, dtype=torch.int64)[:, None]
    rows, *_, handle = buffer.dispatch_with_permute(hidden=x, topk_idx=ids)
    if group.rank() == group.size() - 1:
        buffer.abort()
        return ""
    try:
        buffer.combine_with_unpermute(hidden=rows, handle=handle)
    except PeerFailureError as error:
        return str(error)
    return "no error"
