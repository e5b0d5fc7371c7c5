"""Invalid calls of one rank: it raises the reason, all others name the rank, at once, and all continue."""

from __future__ import annotations

import dataclasses

import mistake_jobs as jobs
import pytest
from mistake_jobs import Outcome
from rank_setup import Setup

from fusco import Settings
from fusco.planner import balancer

pytestmark = pytest.mark.multirank

TIMEOUT_S = 40.0
PROMPTLY_S = 5.0  # a loaded machine's milliseconds; far from the limit in any case
SETUP = Setup(
    ranks_per_node=2, num_experts=8, num_topk=3, max_tokens=20, settings=Settings(timeout_s=TIMEOUT_S, slice_bytes=64)
)
MISTAKEN = 2


def kinds(outcomes: list[Outcome]) -> list[str]:
    assert all(outcome.seconds < PROMPTLY_S for outcome in outcomes), [outcome.seconds for outcome in outcomes]
    return [outcome.kind for outcome in outcomes]


def make(world, mistake, good_call, setup=SETUP) -> list[Outcome]:
    return world.run(jobs.make_mistake, 4, setup, MISTAKEN, mistake, good_call)


# The invalid call, the call of the others, and the error: its type and phrases of its text.
BAD_INPUTS = [
    (jobs.ids_of_wrong_dtype, jobs.dispatch, "TypeError", ["int32 or int64", "torch.float32"]),
    (jobs.ids_of_wrong_shape, jobs.dispatch, "ValueError", ["topk_idx"]),
    (jobs.ids_as_list, jobs.dispatch, "TypeError", ["topk_idx", "list"]),
    (jobs.id_too_large, jobs.dispatch, "ValueError", ["topk_idx[0, 1] = 8", "0 to 7"]),
    (jobs.id_below_minus_one, jobs.dispatch, "ValueError", ["topk_idx[0, 0] = -2", "0 to 7"]),
    (jobs.ids_on_another_device, jobs.dispatch, "ValueError", ["topk_idx", "meta", "the communicator on"]),
    (jobs.too_many_experts, jobs.dispatch, "ValueError", ["6 experts per token", "3"]),
    (jobs.too_many_tokens, jobs.dispatch, "ValueError", ["100 tokens", "max_tokens_per_rank=20"]),
    (jobs.rows_too_wide, jobs.dispatch, "ValueError", ["260 bytes", "max_bytes_per_token=256"]),
    (jobs.rows_too_wide_together, jobs.dispatch, "ValueError", ["264 bytes", "max_bytes_per_token=256"]),
    (jobs.rows_without_elements, jobs.dispatch, "ValueError", ["without elements"]),
    (jobs.too_few_rows, jobs.dispatch, "ValueError", ["payload 0", "tokens"]),
    (jobs.no_payload, jobs.dispatch, "ValueError", ["1 to 8 payloads", "got 0"]),
    (jobs.nine_payloads, jobs.dispatch, "ValueError", ["1 to 8 payloads", "got 9"]),
    (jobs.rows_of_no_tensor, jobs.dispatch, "TypeError", ["payload 0", "NoneType"]),
    (jobs.rows_on_another_device, jobs.dispatch, "ValueError", ["payload 0", "meta", "the communicator on"]),
    (jobs.sparse_rows, jobs.dispatch, "TypeError", ["payload 0", "sparse"]),
    (jobs.weights_of_wrong_shape, jobs.dispatch, "ValueError", ["topk_weights has shape"]),
    (jobs.weights_of_wrong_dtype, jobs.dispatch, "TypeError", ["topk_weights", "torch.int64"]),
    (jobs.weights_wanted_but_not_given, jobs.dispatch, "ValueError", ["with_weights"]),
    (jobs.alignment_of_zero, jobs.dispatch, "ValueError", ["expert_alignment", "0"]),
    (jobs.alignment_of_no_integer, jobs.dispatch, "TypeError", ["expert_alignment", "1.5"]),
    (
        jobs.alignment_beyond_counting,
        jobs.dispatch,
        "ValueError",
        ["at most 2147483647, got 1000000000000"],
    ),
    (jobs.weights_that_cannot_be_read, jobs.dispatch, "OutOfMemoryError", ["no memory for weights"]),
    (jobs.gradients_of_two_payloads, jobs.dispatch, "ValueError", ["single payload"]),
    (jobs.again_with_other_tokens, jobs.dispatch_again, "ValueError", ["payload 0", "tokens"]),
    (jobs.again_along_no_handle, jobs.dispatch_again, "TypeError", ["handle", "Plan"]),
    (jobs.y_of_wrong_length, jobs.combine, "ValueError", ["y must be"]),
    (jobs.y_of_three_dimensions, jobs.combine, "ValueError", ["y must be"]),
    (jobs.y_of_wrong_dtype, jobs.combine, "TypeError", ["torch.int64"]),
    (jobs.y_too_wide, jobs.combine, "ValueError", ["260 bytes", "max_bytes_per_token=256"]),
    (jobs.y_of_no_tensor, jobs.combine, "TypeError", ["y must be a tensor", "list"]),
    (jobs.combine_with_a_tensor_of_weights, jobs.combine, "TypeError", ["must be 'topk' or None, got a tensor"]),
    (jobs.combine_with_other_weights, jobs.combine, "ValueError", ["must be 'topk' or None, got 'softmax'"]),
    (jobs.shuffle_with_an_unknown_rank, jobs.shuffle, "ValueError", ["[17]", "4"]),
    (jobs.shuffle_of_no_segments, jobs.shuffle, "TypeError", ["Segments", "Tensor"]),
    (jobs.shuffle_of_no_mapping, jobs.shuffle, "TypeError", ["mappings", "NoneType"]),
    (jobs.shuffle_without_receive, jobs.shuffle, "TypeError", ["mappings", "NoneType"]),
    (jobs.shuffle_with_a_string, jobs.shuffle, "TypeError", ["ranks, which are integers, got 'a'"]),
]


# Likewise, with TypeError as the type: tensors without plain memory.
NOT_MOVABLE = [
    (jobs.quantised_rows, jobs.dispatch, ["payload 0 is quantised (torch.qint8)"]),
    (jobs.nested_rows, jobs.dispatch, ["payload 0 is a nested tensor"]),
    (jobs.fake_rows, jobs.dispatch, ["payload 0 is a FakeTensor"]),
    (jobs.freed_rows, jobs.dispatch, ["payload 0 has", "its storage has 0"]),
    (jobs.rows_of_a_mesh, jobs.dispatch, ["payload 0 is a OfMesh", "to_local() of a DTensor"]),
    (jobs.fake_ids, jobs.dispatch, ["topk_idx is a FakeTensor"]),
    (jobs.rows_under_grad, jobs.dispatch, ["dispatch was called inside a transform of torch.func"]),
    (jobs.plain_rows_under_grad, jobs.dispatch, ["dispatch was called inside a transform of torch.func"]),
    (jobs.rows_under_vmap, jobs.dispatch, ["dispatch was called inside a transform of torch.func"]),
    (jobs.rows_under_jvp, jobs.dispatch, ["dispatch was called inside a transform of torch.func"]),
    (jobs.rows_with_a_tangent, jobs.dispatch, ["payload 0 has a tangent"]),
    (jobs.rows_while_faking, jobs.dispatch, ["dispatch was called while PyTorch traces"]),
    (jobs.y_under_grad, jobs.combine, ["combine was called inside a transform of torch.func"]),
    (jobs.shuffle_of_freed_memory, jobs.shuffle, ["the base of segments for rank 0 has 8 bytes", "storage has 0"]),
    (jobs.exchange_of_quantised_rows, jobs.exchange, ["output is quantised (torch.qint8)"]),
]


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("mistake", "good_call", "phrases"), NOT_MOVABLE, ids=[mistake.__name__ for mistake, *_ in NOT_MOVABLE]
)
def test_tensors_without_plain_memory_are_rejected_before_any_transfer(world, mistake, good_call, phrases):
    check_rejection(make(world, mistake, good_call), "TypeError", phrases)


@pytest.mark.parametrize(
    ("mistake", "good_call", "kind", "phrases"), BAD_INPUTS, ids=[mistake.__name__ for mistake, *_ in BAD_INPUTS]
)
def test_bad_input_is_rejected_on_its_rank_and_cancels_the_collective_on_all_others(
    world, mistake, good_call, kind, phrases
):
    check_rejection(make(world, mistake, good_call), kind, phrases)


def check_rejection(outcomes, kind, phrases):
    assert kinds(outcomes) == [kind if rank == MISTAKEN else "RejectedInputError" for rank in range(4)], outcomes
    assert all(phrase in outcomes[MISTAKEN].text for phrase in phrases), outcomes[MISTAKEN].text
    for rank in set(range(4)) - {MISTAKEN}:
        assert f"rank {MISTAKEN} rejected its input: {outcomes[MISTAKEN].text}" in outcomes[rank].text


@pytest.mark.cpu_only
def test_too_few_static_rows(world):
    outcomes = make(world, jobs.too_few_static_rows, jobs.dispatch)
    assert kinds(outcomes) == ["RowOverflowError" if rank == MISTAKEN else "" for rank in range(4)], outcomes
    assert "StaticRows(1)" in outcomes[MISTAKEN].text


def check_that_it_broke(outcomes: list[list[Outcome]]) -> None:
    for _, again, closed in outcomes:
        assert again.kind == "ClosedError", again
        assert closed.kind == "", closed


@pytest.mark.cpu_only
def test_a_rank_without_memory_for_its_output(world):
    outcomes = world.run(jobs.dispatch_without_memory, 4, SETUP, MISTAKEN)
    first = [of_rank[0] for of_rank in outcomes]
    assert kinds(first) == ["OutputMemoryError" if rank == MISTAKEN else "PeerFailureError" for rank in range(4)], first
    assert "rows of 12, could not be allocated" in first[MISTAKEN].text
    assert all("an output of" in outcome.text for outcome in first), first
    check_that_it_broke(outcomes)


@pytest.mark.cpu_only
def test_a_balancer_that_gives_no_groups(world):
    outcomes = world.run(jobs.dispatch_balanced_badly, 4, SETUP)
    first = [of_rank[0] for of_rank in outcomes]
    assert "TypeError" in kinds(first), first
    assert all(
        "a balancer must return Groups or Lanes, got str from balance_badly" in outcome.text for outcome in first
    ), first
    check_that_it_broke(outcomes)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("mistaken", "phrases"),
    [
        ([2], "((0, 0), (1, 1)) on ranks 0, 1, 3, ((0, 1), (1, 0)) on rank 2"),
        ([0, 1], "((0, 1), (1, 0)) on ranks 0, 1, ((0, 0), (1, 1)) on ranks 2, 3"),
    ],
)
def test_balancers_that_give_different_groups(world, mistaken, phrases):
    outcomes = world.run(jobs.dispatch_balanced_differently, 4, SETUP, mistaken)
    assert kinds(outcomes) == ["MismatchError"] * 4, outcomes
    assert {outcome.text for outcome in outcomes} == {
        f"ranks disagree in dispatch: the balancer's result is {phrases}. "
        f"A balancer must be pure, and the same on all ranks: equal traffic, equal groups or lanes"
    }


@pytest.mark.cpu_only
@pytest.mark.parametrize(("num_ranks", "ranks_per_node", "mistaken"), [(4, 2, [0, 1, 2, 3]), (4, 4, [2]), (4, 1, [2])])
def test_balancers_of_the_caller_that_agree(world, num_ranks, ranks_per_node, mistaken):
    setup = dataclasses.replace(SETUP, ranks_per_node=ranks_per_node)
    outcomes = world.run(jobs.dispatch_balanced_differently, num_ranks, setup, mistaken)
    assert kinds(outcomes) == [""] * num_ranks, outcomes


def test_a_handle_of_another_communicator(world):
    for outcomes in world.run(jobs.use_foreign_handle, 4, SETUP):
        assert kinds(outcomes) == ["ValueError"] * 2
        assert all("another communicator" in outcome.text for outcome in outcomes)


# Calls that do not match, and phrases of the error of all ranks.
MISMATCHES = [
    (jobs.dispatch_other_width, jobs.dispatch, ["['float32[3]'] on ranks 0, 1, 3", "['float32[4]'] on rank 2"]),
    (jobs.dispatch_other_dtype, jobs.dispatch, ["float32[3]", "float16[3]"]),
    (jobs.dispatch_other_num_topk, jobs.dispatch, ["num_topk is 3 on ranks 0, 1, 3, 2 on rank 2"]),
    (jobs.dispatch_without_weights, jobs.dispatch, ["topk_weights", "none on rank 2"]),
    (jobs.dispatch_other_weights, jobs.dispatch, ["topk_weights", "torch.float64 on rank 2"]),
    (jobs.dispatch_with_gradients, jobs.dispatch, ["requires_grad"]),
    (jobs.dispatch_more_payloads, jobs.dispatch, ["payloads"]),
    (jobs.combine_other_dtype, jobs.combine, ["float32[3]", "bfloat16[3] on rank 2"]),
    (jobs.combine_unweighted, jobs.combine, ["is_weighted"]),
    (jobs.combine, jobs.dispatch, ["different collectives", "dispatch on ranks 0, 1, 3", "combine on rank 2"]),
    (jobs.dispatch, jobs.combine, ["combine on ranks 0, 1, 3", "dispatch on rank 2"]),
    (jobs.dispatch_again, jobs.dispatch, ["dispatch on ranks 0, 1, 3", "dispatch_again on rank 2"]),
    (jobs.shuffle, jobs.combine, ["shuffle on rank 2"]),
    (jobs.shuffle_to_all, jobs.shuffle, ["rank 2 sends 8 bytes to rank 0, which expects 0"]),
]


@pytest.mark.parametrize(
    ("call", "others_call", "phrases"),
    MISMATCHES,
    ids=[f"{call.__name__}-{other.__name__}" for call, other, _ in MISMATCHES],
)
def test_calls_that_do_not_match_raise_the_same_error_on_all_ranks(world, call, others_call, phrases):
    outcomes = make(world, call, others_call)
    assert kinds(outcomes) == ["MismatchError"] * 4, outcomes
    assert len({outcome.text for outcome in outcomes}) == 1
    assert all(phrase in outcomes[0].text for phrase in phrases), outcomes[0].text


@pytest.mark.parametrize("ranks_per_node", [1, 4])
def test_the_same_within_one_node_and_between_nodes_of_one_rank(world, ranks_per_node):
    setup = dataclasses.replace(SETUP, ranks_per_node=ranks_per_node)
    rejected = make(world, jobs.id_too_large, jobs.dispatch, setup)
    assert kinds(rejected) == ["RejectedInputError", "RejectedInputError", "ValueError", "RejectedInputError"]
    assert kinds(make(world, jobs.combine, jobs.dispatch, setup)) == ["MismatchError"] * 4


@pytest.mark.cpu_only
def test_rows_that_were_sent_with_records_are_taken_off_the_network_if_ranks_disagree(world):
    setup = dataclasses.replace(SETUP, settings=Settings(timeout_s=TIMEOUT_S))  # whose slices hold all rows
    check_rejection(make(world, jobs.id_too_large, jobs.dispatch, setup), "ValueError", ["8"])
    for call in (jobs.dispatch_other_width, jobs.combine):
        assert kinds(make(world, call, jobs.dispatch, setup)) == ["MismatchError"] * 4


def test_a_closed_communicator_says_so(world):
    for outcomes in world.run(jobs.use_after_close, 4, SETUP):
        assert outcomes.pop("close").kind == ""  # closing again is allowed
        assert {outcome.kind for outcome in outcomes.values()} == {"ClosedError"}, outcomes
        assert all(verb in outcome.text and "closed" in outcome.text for verb, outcome in outcomes.items())


# The arguments that differ on one rank, its error, and a phrase of the text on all ranks.
DIFFERENCES = [
    ({"settings": Settings(timeout_s=TIMEOUT_S, slice_bytes=65)}, "MismatchError", "slice_bytes"),
    ({"settings": Settings(timeout_s=TIMEOUT_S + 1, slice_bytes=64)}, "MismatchError", "timeout_s"),
    ({"num_topk": 4}, "MismatchError", "num_topk"),
    ({"num_experts": 16}, "MismatchError", "num_experts"),
    ({"max_tokens_per_rank": 21}, "MismatchError", "max_tokens_per_rank"),
    ({"max_bytes_per_token": 512}, "MismatchError", "max_bytes_per_token"),
    ({"ranks_per_node": 1}, "MismatchError", "ranks_per_node"),
    ({"balancer": balancer.balance_static}, "MismatchError", "balance"),
    ({"expert_placement": [0, 0, 1, 1, 2, 2, 3, 3]}, "MismatchError", "expert_placement"),
    ({"num_experts": 7}, "ValueError", "7 experts do not divide evenly among 4 ranks"),
    ({"max_tokens_per_rank": 0}, "ValueError", "max_tokens_per_rank must be positive, got 0"),
    ({"num_topk": -1}, "ValueError", "num_topk must be positive, got -1"),
    ({"expert_placement": [0, 1, 2]}, "ValueError", "places 3 experts, but num_experts=8"),
    ({"expert_placement": [0, 1, 2, 3, 0, 1, 2, 4]}, "ValueError", "expert 7 is placed on rank 4"),
    ({"expert_placement": 3}, "TypeError", ""),
    ({"max_tokens_per_rank": 20.5}, "TypeError", "max_tokens_per_rank"),
    ({"num_experts": "8"}, "TypeError", ""),
    ({"expert_placement": "01230123"}, "TypeError", "expert_placement must be a sequence of integers, got '01230123'"),
    ({"expert_placement": [0, 0, 1, 1, 2, 2, 3, 3.5]}, "TypeError", "3.5"),
    ({"ranks_per_node": 2.0}, "TypeError", "ranks_per_node must be an integer, got 2.0"),
    ({"device": "mps"}, "ValueError", "device must be 'cpu' or 'cuda', got 'mps'"),
    ({"device": "foo"}, "ValueError", "device must be 'cpu' or 'cuda', got 'foo'"),
    ({"device": None}, "ValueError", "device must be 'cpu' or 'cuda', got None"),
    ({"balancer": "static"}, "TypeError", "such as fusco.BALANCERS['lanes'], got 'static'"),
    ({"balancer": 3}, "TypeError", "balancer must be a function of the traffic"),
]


# No values in the names: the address of a function differs between the processes of pytest-xdist.
@pytest.mark.parametrize(
    ("changes", "kind", "phrase"), DIFFERENCES, ids=["-".join(changes) for changes, *_ in DIFFERENCES]
)
def test_communicators_with_different_arguments(world, changes, kind, phrase):
    outcomes = world.run(jobs.make_differently, 4, SETUP, MISTAKEN, changes)
    others = "MismatchError" if kind == "MismatchError" else "RejectedInputError"
    assert kinds(outcomes) == [kind if rank == MISTAKEN else others for rank in range(4)], outcomes
    assert all(phrase in outcome.text for outcome in outcomes), outcomes


@pytest.mark.parametrize(
    ("changes", "kind", "phrase"),
    [
        ({"ranks_per_node": 3}, "ValueError", "ranks_per_node=3 does not divide a group of 4 ranks"),
        ({"ranks_per_node": 0}, "ValueError", "ranks_per_node must be positive, got 0"),
        ({"num_experts": 6}, "ValueError", "6 experts"),
        ({"max_bytes_per_token": 10**18}, "SharedMemoryError", "lower max_tokens_per_rank"),
        ({"max_tokens_per_rank": 1 << 40}, "SharedMemoryError", "lower max_tokens_per_rank"),
    ],
    ids=str,
)
def test_invalid_arguments_of_all_ranks_raise_on_all_ranks(world, changes, kind, phrase):
    outcomes = world.run(jobs.make_differently, 4, SETUP, -1, changes)
    assert kinds(outcomes) == [kind] * 4, outcomes
    assert all(phrase in outcome.text for outcome in outcomes), outcomes


def test_a_placement_may_be_any_sequence(world):
    changes = {"expert_placement": range(4), "num_experts": 4}
    outcomes = world.run(jobs.make_differently, 4, SETUP, -1, changes)
    assert kinds(outcomes) == [""] * 4, outcomes
    setup = dataclasses.replace(SETUP, expert_placement=(0, 1, 2, 3, 3, 2, 1, 0))
    outcomes = world.run(jobs.make_differently, 4, setup, MISTAKEN, {"expert_placement": [0, 1, 2, 3, 3, 2, 1, 0]})
    assert kinds(outcomes) == [""] * 4, outcomes
