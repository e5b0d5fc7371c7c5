"""Any sequence of calls, repeated or not, valid or not, returns and raises what it does where nothing is repeated."""

from __future__ import annotations

import random

import pytest
import torch
from repeated_rig import MAX_TOKENS, NODES, NUM_RANKS, NUM_TOPK, TOPOLOGY, Node, inputs, is_undefined

from fusco import RejectedInputError, StaticRows

OPTIONS = (
    {},
    {"static": StaticRows(NUM_RANKS * MAX_TOKENS * NUM_TOPK)},
    {"static": StaticRows(rows_per_expert=4, on_overflow="drop")},
    {"expert_alignment": 4},
    {"with_weights": True},
)
FIELDS = ("internode_row_bytes", "internode_empty_bytes", "internode_metadata_bytes", "num_sms")


class Calls:
    """Arguments of a call, which often stay as they are; the same on all ranks but for values and errors."""

    def __init__(self, rank: int, seed: int) -> None:
        self._rank, self._choices = rank, random.Random(seed)
        self.options, self.is_inference, self.sums_dtype = OPTIONS[0], False, torch.float32
        self._num_tokens, self._dtype, self._has_weights, self._has_scales = MAX_TOKENS, torch.float32, True, False

    def happens(self, probability: float) -> bool:
        """Return whether something happens in this call, on all ranks."""
        return self._choices.random() < probability

    def kept_one(self, kept):
        """Return the latest of the results, or sometimes an older one."""
        return self._choices.choice(kept) if self.happens(0.2) else kept[-1]

    def next(self, step: int):
        """Return payloads, ids and weights of a dispatch; one rank's are sometimes invalid."""
        choices = self._choices
        if self.happens(0.1):
            self.options = choices.choice((OPTIONS[0], *OPTIONS))
        if self.happens(0.05):
            self._num_tokens = choices.choice((MAX_TOKENS, MAX_TOKENS, 5, 0))
        if self.happens(0.05):
            self.is_inference = not self.is_inference
        if self.happens(0.1):
            self._dtype = choices.choice((torch.float32, torch.bfloat16))
            self._has_weights, self._has_scales = self.happens(0.8), self.happens(0.3)
        if self.happens(0.3):
            self.sums_dtype = choices.choice((torch.float32, torch.bfloat16))
        wrong, has_wrong_ids = choices.choice((*[-1] * 12, *range(NUM_RANKS))), self.happens(0.5)
        x, ids, weights = inputs(self._rank, step, self._num_tokens, self._dtype)
        if wrong == self._rank and self._num_tokens:
            if has_wrong_ids and "static" not in self.options:  # those are raised by a later call
                ids[-1, 0] = 99
            else:
                x = x.new_zeros(self._num_tokens, 999)
        has_weights = self._has_weights or "with_weights" in self.options
        return [x, x[:, :3].contiguous()] if self._has_scales else x, ids, weights if has_weights else None

    def rows_again(self, step: int):
        """Return payloads for a handle of each communicator: one or two, in any order, that may require gradients."""
        x = inputs(self._rank, 1000 + step)[0]
        payloads = [x, x[:, :4].to(torch.bfloat16)][:: self._choices.choice((1, 1, -1))]
        if self.happens(0.7):
            return [payloads[0].requires_grad_(self.happens(0.3))]
        return payloads


def along_handles(comm, sent, payloads):
    """Return what dispatches and combines along a handle return, and gradients if there are any."""
    payloads = [each[: sent.handle.num_tokens].detach().requires_grad_(each.requires_grad) for each in payloads]
    rows = comm.dispatch_again(payloads, sent.handle)
    found = [each[~is_undefined(sent)] for each in rows]
    found += comm.combine_all([each.detach() * 2 for each in rows], sent.handle)
    if found[0].requires_grad:
        found[0].float().square().sum().backward()
        found.append(payloads[0].grad)
    return [each.detach() for each in found]


def outcome_of(comm, call, options):
    """Return the result of a dispatch and its rows, or the error."""
    try:
        sent = comm.dispatch(*call, **options)
    except (ValueError, RejectedInputError) as error:
        return None, str(error)
    for payload in sent.payloads:
        payload[is_undefined(sent)] = 0
    tensors = [*sent.payloads, sent.num_rows_per_expert, sent.num_dropped_per_expert]
    tensors += [] if sent.weights is None else [sent.weights]
    return sent, tensors


def same(one, other) -> bool:
    if isinstance(one, str):
        return one == other
    are_equal = all(map(torch.equal, one, other))
    return are_equal and [each.is_inference() for each in one] == [each.is_inference() for each in other]


@pytest.mark.parametrize("topology", [TOPOLOGY, NODES], ids=["a node", "two nodes"])
def test_any_sequence_of_calls(topology, repeats):
    def program(comm, other, _library):
        calls, kept = Calls(comm.rank, seed=1), []
        for step in range(100):
            call = calls.next(step)
            with torch.inference_mode(calls.is_inference):
                made = [outcome_of(each, call, calls.options) for each in (comm, other)]
                assert same(*(found for _, found in made)), step
                if made[0][0] is None:
                    continue
                kept.append([sent for sent, _ in made])
                if calls.happens(0.15):
                    continue  # no combine follows
                weights = None if calls.happens(0.1) else "topk"
                both = zip((comm, other), calls.kept_one(kept), strict=True)
                sums = [
                    each.combine(sent.rows.to(calls.sums_dtype), sent.handle, weights=weights) for each, sent in both
                ]
            assert same(sums[:1], sums[1:]), step
            if not calls.is_inference and calls.happens(0.5):
                of, payloads = calls.kept_one(kept), calls.rows_again(step)
                assert same(*map(along_handles, (comm, other), of, [payloads] * 2)), step
            assert [getattr(comm.profile, name) for name in FIELDS] == [getattr(other.profile, name) for name in FIELDS]

    Node(topology=topology).run(program)
    assert min(repeats()) > 20
