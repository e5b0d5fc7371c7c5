"""Functions on ranks: mistakes in calls of ``deep_ep``, on all ranks and on one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hybrid_ep_jobs import open_hybrid
from integration_cases import HIDDEN, NUM_LOCAL

from fusco import ClosedError
from fusco.integrations.deep_ep.buffer import Buffer, Config
from fusco.integrations.deep_ep.ep_buffer import ElasticBuffer


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
        lambda: Buffer(group, comm=object()),
        lambda: Buffer(group).get_local_buffer_tensor(torch.float32),
    ):
        try:
            call()
        except (ValueError, TypeError, NotImplementedError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    buffer.dispatch_with_permute(hidden=x, topk_idx=ids)
    buffer.destroy()
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
    attempt(send, lambda: send(is_token_in_rank=is_in[:, :1]))
    attempt(send, lambda: send(topk_weights=torch.ones(3, 4)))
    attempt(send, lambda: send(topk_idx=None))
    attempt(send, lambda: send(expert_alignment=0))
    attempt(lambda: first.dispatch(x, handle), lambda: first.dispatch(x, handle, topk_idx=ids))
    attempt(lambda: first.combine(rows, handle), lambda: first.combine(rows, (None, None)))
    attempt(lambda: first.combine(rows, handle), lambda: first.combine(rows, handle, bias=x[:1]))
    attempt(expand, lambda: expand(num_experts=None))
    expanded, _, _, of_second, _ = expand()
    attempt(lambda: second.combine(expanded, of_second), lambda: second.combine(expanded, None))
    attempt(expand, lambda: expand(cumulative_local_expert_recv_stats=torch.zeros(1, dtype=torch.int32)))
    for changes in ({"topk_idx": ids}, {"num_experts": 3 * NUM_LOCAL}, {"expert_alignment": 8}):
        attempt(
            lambda: second.dispatch(x, handle=of_second),
            lambda changes=changes: second.dispatch(x, handle=of_second, **changes),
        )
    attempt(lambda: second.combine(expanded, of_second), lambda: second.combine(expanded, of_second, bias=(x[0],)))
    values = torch.ones(len(expanded))
    attempt(
        lambda: second.combine(expanded, of_second, topk_weights=values),
        lambda: second.combine(expanded, of_second, topk_weights=values[1:]),
    )
    attempt(permute, lambda: permute(topk_idx=None))
    permuted, *_, of_hybrid = permute()
    attempt(permute, lambda: permute(num_of_experts=5))
    attempt(permute, lambda: permute(probs=torch.ones(4, 2 * NUM_LOCAL)))
    attempt(
        lambda: hybrid.dispatch_with_permute(hidden=x, handle=of_hybrid),
        lambda: hybrid.dispatch_with_permute(hidden=x, handle=of_hybrid, probs=torch.ones(3, 9 * NUM_LOCAL)),
    )
    for changes in ({"handle": None}, {"probs": torch.ones(len(permuted) + 1)}, {"pad_multiple": 8}):
        attempt(
            lambda: hybrid.combine_with_unpermute(hidden=permuted, handle=of_hybrid),
            lambda changes=changes: hybrid.combine_with_unpermute(
                **{"hidden": permuted, "handle": of_hybrid, **changes}
            ),
        )
    sent, *_, of_ranks = hybrid.dispatch(x, topk_idx=ids, topk_weights=weights)
    attempt(
        lambda: hybrid.combine(sent, handle=of_ranks),
        lambda: hybrid.combine(sent, handle=of_ranks, probs=torch.ones(len(sent) + 1, 2 * NUM_LOCAL)),
    )
    # Along a handle of an earlier communicator than the latest.
    many = 9
    first.dispatch(x.repeat(many, 1), is_token_in_rank=is_in.repeat(many, 1), num_tokens_per_expert=many * of_experts)
    second.dispatch(x.repeat(many, 1), topk_idx=ids.repeat(many, 1), num_experts=NUM_LOCAL * 2, do_expand=True)
    too_few = Config(num_sms=-1)
    attempt(lambda: first.dispatch(x, handle), lambda: first.dispatch(x, handle, config=too_few))
    attempt(lambda: first.combine(rows, handle), lambda: first.combine(rows, handle, config=too_few))
    attempt(
        lambda: second.dispatch(x, handle=of_second), lambda: second.dispatch(x, handle=of_second, expert_alignment=8)
    )
    assert torch.equal(first.combine(rows, handle)[0], x * is_in.sum(1, keepdim=True))  # all of them work
    assert torch.equal(second.combine(expanded, of_second)[0], 2 * x)
    assert torch.equal(hybrid.combine_with_unpermute(hidden=permuted, handle=of_hybrid)[0], 2 * x)
    for buffer in (first, second):
        buffer.destroy()
    hybrid.destroy()
    return outcomes
