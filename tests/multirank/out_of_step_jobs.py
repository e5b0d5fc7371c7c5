"""Functions on ranks: calls of ``deep_ep`` in which ranks are out of step, or disagree on what is theirs together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hybrid_ep_jobs import open_hybrid
from integration_cases import HIDDEN, NUM_LOCAL

from comparison import assert_same_bits
from fusco.integrations import expert_rows
from fusco.integrations.deep_ep.buffer import Buffer
from fusco.integrations.deep_ep.ep_buffer import ElasticBuffer
from fusco.integrations.group_communicators import GroupCommunicators

NUM_EXPERTS = 2 * NUM_LOCAL
SOON_S = 10.0  # far below the limit of a wait


def attempt(group: dist.ProcessGroup, *of_ranks: Callable[[], Any]) -> str:
    """Call what this rank calls, which must raise; soon; return the error's text."""
    begin = time.monotonic()
    with pytest.raises((ValueError, TypeError, RuntimeError, MemoryError)) as raised:
        of_ranks[group.rank()]()
    seconds = time.monotonic() - begin
    assert seconds < SOON_S, (raised.value, seconds)
    return f"{type(raised.value).__name__}: {raised.value}"


def calls_of_two_kinds(group: dist.ProcessGroup) -> list[str]:
    """Each rank calls something else; the next call, in step, works. Return the texts of errors."""
    x, ids, weights = torch.ones(4, HIDDEN), torch.arange(8).view(4, 2) % NUM_EXPERTS, torch.ones(4, 2)
    more = 8
    first, second, hybrid, texts = Buffer(group), ElasticBuffer(group), open_hybrid(group, 2), []

    def send(times: int = 1, num_experts: int = NUM_EXPERTS, **changes: Any) -> Any:
        routing = (ids % num_experts).repeat(times, 1)
        _, _, of_experts, is_in, _ = first.get_dispatch_layout(routing, num_experts)
        sizes = {"is_token_in_rank": is_in, "num_tokens_per_expert": of_experts, "topk_idx": routing}
        return first.dispatch(x.repeat(times, 1), **{**sizes, **changes})

    def expand(times: int = 1, num_experts: int = NUM_EXPERTS) -> Any:
        routing = (ids % num_experts).repeat(times, 1)
        return second.dispatch(x.repeat(times, 1), topk_idx=routing, num_experts=num_experts, do_expand=True)

    def permute(times: int = 1, num_experts: int = NUM_EXPERTS) -> Any:
        routing = (ids % num_experts).repeat(times, 1)
        return hybrid.dispatch_with_permute(
            hidden=x.repeat(times, 1),
            topk_idx=routing,
            topk_weights=weights.repeat(times, 1),
            num_of_experts=num_experts,
        )

    def differ(*of_ranks: Callable[[], Any]) -> None:
        texts.append(attempt(group, *of_ranks))
        texts.append(attempt(group, *reversed(of_ranks)))

    # Before there is a communicator.
    differ(lambda: hybrid.dispatch(x, topk_idx=ids), permute)
    differ(send, lambda: send(num_experts=2))
    rows, *_, handle, _ = send()
    differ(send, lambda: first.combine(rows, handle))
    differ(send, lambda: first.dispatch(x, handle))
    differ(lambda: send(more), lambda: first.combine(rows, handle))
    differ(send, lambda: send(num_experts=2))
    differ(send, lambda: send(topk_idx=None))
    send(more)
    # Along a handle of the first communicator, while the other rank is in the second.
    differ(send, lambda: first.combine(rows, handle))
    differ(lambda: first.dispatch(x, handle), lambda: send(2 * more))
    num_copies = first.get_dispatch_layout(ids, NUM_EXPERTS)[3].sum(1, keepdim=True)
    assert_same_bits(first.combine(rows, handle)[0], x * num_copies, "sums")

    expanded, _, _, of_second, _ = expand()
    differ(expand, lambda: second.combine(expanded, of_second))
    differ(expand, lambda: expand(num_experts=2))
    differ(lambda: expand(more), lambda: expand(num_experts=2))
    assert torch.equal(second.combine(expanded, of_second)[0], 2 * x)

    permuted, *_, of_hybrid = permute()
    differ(permute, lambda: permute(num_experts=2))
    differ(permute, lambda: hybrid.dispatch(x, topk_idx=ids))
    differ(lambda: permute(more), lambda: hybrid.combine_with_unpermute(hidden=permuted, handle=of_hybrid))
    permute(more)
    assert torch.equal(hybrid.combine_with_unpermute(hidden=permuted, handle=of_hybrid)[0], 2 * x)
    for buffer in (first, second):
        buffer.destroy()
    hybrid.destroy()
    return texts


def memory_that_ends(group: dist.ProcessGroup) -> list[str]:
    """Rank 1 has no memory for what a dispatch sends, or fails in the middle; the next call works."""
    x, ids = torch.ones(4, HIDDEN), torch.arange(8).view(4, 2) % NUM_EXPERTS
    first, second, hybrid, texts = Buffer(group), ElasticBuffer(group), open_hybrid(group, 2), []
    _, _, of_experts, is_in, _ = first.get_dispatch_layout(ids, NUM_EXPERTS)
    calls = [
        (expert_rows, "padded", lambda: hybrid.dispatch_with_permute(hidden=x, topk_idx=ids)),
        (torch, "cat", lambda: first.dispatch(x, None, None, None, is_in, of_experts, ids)),
        (torch, "cat", lambda: hybrid.dispatch(x, topk_idx=ids)),
        (
            GroupCommunicators,
            "need_of",
            lambda: second.dispatch(x, topk_idx=ids, num_experts=NUM_EXPERTS, do_expand=True),
        ),
    ]

    for place, name, call in calls:

        def fail(*given: Any, place: Any = place, name: str = name, call: Callable[[], Any] = call) -> None:
            with mock.patch.object(place, name, side_effect=MemoryError(f"no memory for {name}")):
                call()

        call()
        texts.append(attempt(group, call, fail))
        call()
    return texts


def bad_routings(group: dist.ProcessGroup) -> list[str]:
    """Return the texts of errors for ids and ranks of tokens that rank 1 gives; the next call works."""
    x, ids, weights = torch.ones(3, HIDDEN), torch.tensor([[0, 5], [1, -1], [4, 3]]), torch.ones(3, 2)
    first, second, hybrid, texts = Buffer(group), ElasticBuffer(group), open_hybrid(group, 2), []
    _, _, of_experts, is_in, _ = first.get_dispatch_layout(ids, NUM_EXPERTS)
    probs = torch.ones(3, NUM_EXPERTS)

    def send(**changes: Any) -> Any:
        return first.dispatch(
            **{"x": x, "is_token_in_rank": is_in, "num_tokens_per_expert": of_experts, "topk_idx": ids, **changes}
        )

    def expand(**changes: Any) -> Any:
        return second.dispatch(**{"x": x, "topk_idx": ids, "num_experts": NUM_EXPERTS, "do_expand": True, **changes})

    def permute(**changes: Any) -> Any:
        return hybrid.dispatch_with_permute(**{"hidden": x, "topk_idx": ids, **changes})

    def dispatch(**changes: Any) -> Any:
        return hybrid.dispatch(**{"hidden": x, "topk_idx": ids, **changes})

    def with_id(value: int) -> torch.Tensor:
        return torch.where(ids == 3, value, ids)

    wrong = [
        *((call, {"topk_idx": with_id(value)}) for call in (send, expand, permute, dispatch) for value in (99, 6, -7)),
        *((call, {"topk_idx": with_id(99), "probs": probs}) for call in (permute, dispatch)),
        *((call, {"topk_idx": ids.float()}) for call in (send, expand, permute, dispatch)),
        *((call, {"topk_idx": ids[:2]}) for call in (send, expand, permute, dispatch)),
        (permute, {"topk_weights": weights[:, :1]}),
        (send, {"x": torch.ones(3)}),
        (expand, {"x": torch.ones(3)}),
        (permute, {"hidden": torch.ones(3)}),
        (dispatch, {"hidden": torch.ones(3)}),
        (send, {"is_token_in_rank": is_in.long()}),
        (send, {"is_token_in_rank": torch.ones_like(is_in)}),
        (send, {"is_token_in_rank": torch.zeros_like(is_in)}),
    ]
    for call, changes in wrong:
        texts.append(attempt(group, call, lambda call=call, changes=changes: call(**changes)))
    for call in (send, expand, permute, dispatch):
        call()
    return texts
