"""Invalid calls of one rank: it raises the reason, all others name the rank, at once, and all continue."""

from __future__ import annotations

import dataclasses

import mistake_jobs as jobs
import pytest
from mistake_jobs import Outcome
from mistakes import BAD_INPUTS, MISMATCHES, MISTAKES, NOT_MOVABLE
from rank_setup import Setup

from fusco import Settings, __version__
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


def make(world, names, setup=SETUP) -> dict[str, list[Outcome]]:
    of_ranks = world.run(jobs.make_mistakes, 4, setup, MISTAKEN, list(names))
    return {name: [outcomes[name] for outcomes in of_ranks] for name in names}


@pytest.mark.parametrize(
    "names",
    [list(BAD_INPUTS), pytest.param(list(NOT_MOVABLE), marks=pytest.mark.cpu_only)],
    ids=["bad inputs", "not movable"],
)
def test_bad_input_is_rejected_on_its_rank_and_cancels_the_collective_on_all_others(world, names):
    for name, outcomes in make(world, names).items():
        check_rejection(outcomes, name)


def check_rejection(outcomes, name):
    expected = [MISTAKES[name].kind if rank == MISTAKEN else "RejectedInputError" for rank in range(4)]
    assert kinds(outcomes) == expected, (name, outcomes)
    assert all(phrase in outcomes[MISTAKEN].text for phrase in MISTAKES[name].phrases), (name, outcomes[MISTAKEN].text)
    for rank in set(range(4)) - {MISTAKEN}:
        assert f"rank {MISTAKEN} rejected its input: {outcomes[MISTAKEN].text}" in outcomes[rank].text


@pytest.mark.cpu_only
def test_too_few_static_rows(world):
    (outcomes,) = make(world, ["too_few_static_rows"]).values()
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


@pytest.mark.cpu_only
def test_two_communicators_in_different_orders(world):
    setup = dataclasses.replace(SETUP, settings=Settings(timeout_s=1.0))
    outcomes = world.run(jobs.interleave_differently, 2, setup)
    assert kinds(outcomes) == ["PeerFailureError"] * 2, outcomes
    texts = [outcome.text for outcome in outcomes]
    assert any(" is in dispatch #1 of another communicator, and has been outside any" in text for text in texts), texts


def test_calls_that_do_not_match_raise_the_same_error_on_all_ranks(world):
    for name, outcomes in make(world, MISMATCHES).items():
        check_mismatch(outcomes, name)


def check_mismatch(outcomes, name):
    assert kinds(outcomes) == ["MismatchError"] * 4, (name, outcomes)
    assert len({outcome.text for outcome in outcomes}) == 1, (name, outcomes)
    assert all(phrase in outcomes[0].text for phrase in MISTAKES[name].phrases), outcomes[0].text


@pytest.mark.parametrize("ranks_per_node", [1, 4])
def test_the_same_within_one_node_and_between_nodes_of_one_rank(world, ranks_per_node):
    setup = dataclasses.replace(SETUP, ranks_per_node=ranks_per_node)
    rejected, mismatched = make(world, ["id_too_large", "combine_while_others_dispatch"], setup).values()
    assert kinds(rejected) == ["RejectedInputError", "RejectedInputError", "ValueError", "RejectedInputError"]
    assert kinds(mismatched) == ["MismatchError"] * 4


@pytest.mark.cpu_only
def test_rows_and_sums_that_were_sent_with_records_are_taken_off_the_network_if_ranks_disagree(world):
    setup = dataclasses.replace(SETUP, settings=Settings(timeout_s=TIMEOUT_S))  # whose slices hold all rows
    # Of a dispatch and of a combine.
    for name, outcomes in make(world, ["id_too_large", "y_of_three_dimensions", *MISMATCHES], setup).items():
        (check_mismatch if name in MISMATCHES else check_rejection)(outcomes, name)


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
    ({"num_topk": 9}, "ValueError", "num_topk is 9, but there are 8 experts"),
    ({"num_experts": 7}, "ValueError", "7 experts do not divide evenly among 4 ranks"),
    ({"max_tokens_per_rank": 0}, "ValueError", "max_tokens_per_rank must be positive, got 0"),
    ({"num_topk": -1}, "ValueError", "num_topk must be positive, got -1"),
    ({"expert_placement": [0, 1, 2]}, "ValueError", "places 3 experts, but num_experts=8"),
    ({"expert_placement": [0, 1, 2, 3, 0, 1, 2, 4]}, "ValueError", "expert 7 is placed on rank 4"),
    ({"expert_placement": 3}, "TypeError", ""),
    ({"max_tokens_per_rank": 20.5}, "TypeError", "max_tokens_per_rank"),
    (
        {"hidden": 16},
        "ValueError",
        "give hidden (with dtype, if rows are not bfloat16) or max_bytes_per_token: got both",
    ),
    ({"max_bytes_per_token": None}, "ValueError", "got neither (hidden=None, max_bytes_per_token=None)"),
    ({"max_bytes_per_token": None, "hidden": 0}, "ValueError", "hidden must be positive, got 0"),
    ({"max_bytes_per_token": None, "hidden": 2, "dtype": 3}, "TypeError", "dtype must be a torch.dtype, got 3"),
    ({"num_experts": "8"}, "TypeError", ""),
    ({"expert_placement": "01230123"}, "TypeError", "expert_placement must be a sequence of integers, got '01230123'"),
    ({"expert_placement": [0, 0, 1, 1, 2, 2, 3, 3.5]}, "TypeError", "3.5"),
    ({"ranks_per_node": 2.0}, "TypeError", "ranks_per_node must be an integer, got 2.0"),
    ({"device": "mps"}, "ValueError", "device must be 'cpu' or 'cuda', got 'mps'"),
    ({"device": "foo"}, "ValueError", "device must be 'cpu' or 'cuda', got 'foo'"),
    ({"device": None}, "ValueError", "device must be 'cpu' or 'cuda', got None"),
    ({"balancer": "statics"}, "ValueError", "balancer 'statics' is not one of lanes, static"),
    ({"balancer": 3}, "TypeError", "balancer must be a name (lanes, static"),
    ({"settings": {"timeout_s": 1}}, "TypeError", "settings must be Settings, got {'timeout_s': 1}"),
]


def make_differently(world, mistaken, changes, setup=SETUP):
    return zip(*world.run(jobs.make_differently, 4, setup, mistaken, changes), strict=True)


def test_communicators_with_different_arguments(world):
    of_changes = make_differently(world, MISTAKEN, [changes for changes, *_ in DIFFERENCES])
    for (changes, kind, phrase), outcomes in zip(DIFFERENCES, of_changes, strict=True):
        others = "MismatchError" if kind == "MismatchError" else "RejectedInputError"
        assert kinds(outcomes) == [kind if rank == MISTAKEN else others for rank in range(4)], (changes, outcomes)
        assert all(phrase in outcome.text for outcome in outcomes), (changes, outcomes)


def test_another_version_of_fusco(world):
    outcomes = world.run(jobs.make_with_another_version, 2, SETUP, "0.1.9")
    assert kinds(outcomes) == ["MismatchError"] * 2, outcomes
    assert all(f"fusco is {__version__} on rank 0, 0.1.9 on rank 1" in each.text for each in outcomes), outcomes


OF_ALL = [
    ({"ranks_per_node": 3}, "ValueError", "ranks_per_node=3 does not divide a group of 4 ranks"),
    ({"ranks_per_node": 0}, "ValueError", "ranks_per_node must be positive, got 0"),
    ({"num_experts": 6}, "ValueError", "6 experts"),
    ({"max_bytes_per_token": 10**18}, "SharedMemoryError", "lower max_tokens_per_rank"),
    ({"max_tokens_per_rank": 1 << 40}, "SharedMemoryError", "lower max_tokens_per_rank"),
]


def test_invalid_arguments_of_all_ranks_raise_on_all_ranks(world):
    of_changes = make_differently(world, -1, [changes for changes, *_ in OF_ALL])
    for (changes, kind, phrase), outcomes in zip(OF_ALL, of_changes, strict=True):
        assert kinds(outcomes) == [kind] * 4, (changes, outcomes)
        assert all(phrase in outcome.text for outcome in outcomes), (changes, outcomes)


def test_a_placement_may_be_any_sequence(world):
    setup = dataclasses.replace(SETUP, expert_placement=(0, 1, 2, 3, 3, 2, 1, 0))
    (of_range,) = make_differently(world, -1, [{"expert_placement": range(4), "num_experts": 4}])
    (of_list,) = make_differently(world, MISTAKEN, [{"expert_placement": list(setup.expert_placement)}], setup)
    assert kinds([*of_range, *of_list]) == [""] * 8
