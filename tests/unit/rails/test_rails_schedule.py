"""The choice of a rail: hand-written cases, then its laws for any state."""

import pytest
from hypothesis import given, strategies as st

from fusco.rails.limits import Limits
from fusco.rails.schedule import POLICIES, WAIT, Policy, View, policy_named, rails_of

LIMITS = Limits(direct_first=2, direct_depth=4, borrowed_per_rail=2)
FUSELINK = [POLICIES["fuselink"], POLICIES["fuselink-paper"]]


@st.composite
def views(draw):
    num_rails = draw(st.integers(1, 6))
    every = (1 << num_rails) - 1
    chunks = st.lists(st.integers(0, 5), min_size=num_rails, max_size=num_rails)
    masks = st.integers(0, every)
    return View(draw(st.integers(1, every)), draw(masks), draw(masks), draw(chunks), draw(chunks))


@pytest.mark.parametrize(
    ("outstanding", "borrowed", "expected"),
    [
        ([0, 0, 0, 0], [0, 0, 0, 0], 0),  # the direct rail first
        ([2, 0, 0, 0], [0, 0, 0, 0], 1),  # then idle ones; rail 3 is busy
        ([2, 1, 0, 0], [0, 1, 0, 0], 2),  # the one with less
        ([2, 2, 2, 0], [0, 2, 2, 0], 0),  # at their bound: deeper on the direct one
        ([4, 2, 2, 0], [0, 2, 2, 0], WAIT),
        ([2, 0, 0, 0], [0, 2, 1, 0], 2),  # others borrow rail 1
    ],
)
def test_by_hand(outstanding, borrowed, expected):
    view = View(direct=0b0001, usable=0b1111, idle=0b0110, outstanding=outstanding, borrowed=borrowed)
    assert [policy.choose(view, LIMITS) for policy in FUSELINK] == [expected] * 2


@given(views(), st.sampled_from(FUSELINK))
def test_never_a_busy_indirect_rail_while_a_direct_one_works(view, policy):
    rail = policy.choose(view, LIMITS)
    if rail != WAIT and view.direct & view.usable and not view.direct >> rail & 1:
        assert view.idle >> rail & 1


@given(views(), st.sampled_from(list(POLICIES.values())))
def test_only_rails_that_work(view, policy):
    rail = policy.choose(view, LIMITS)
    assert rail == WAIT or view.usable >> rail & 1


@given(views(), st.sampled_from([*FUSELINK, POLICIES["direct"]]))
def test_borrowed_at_most_the_bound(view, policy):
    rail = policy.choose(view, LIMITS)
    if rail != WAIT and not view.direct >> rail & 1:
        assert view.borrowed[rail] < LIMITS.borrowed_per_rail


@given(views(), st.sampled_from(FUSELINK))
def test_direct_first(view, policy):
    direct = rails_of(view.direct & view.usable)
    if any(view.outstanding[rail] < LIMITS.direct_first for rail in direct):
        assert policy.choose(view, LIMITS) in direct


@given(views(), st.sampled_from(FUSELINK))
def test_work_conserving_when_all_are_idle(view, policy):
    view.idle = view.usable
    direct, indirect = rails_of(view.usable & view.direct), rails_of(view.usable & ~view.direct)
    has_room = any(view.outstanding[rail] < LIMITS.direct_depth for rail in direct) or any(
        view.borrowed[rail] < LIMITS.borrowed_per_rail for rail in indirect
    )
    assert (policy.choose(view, LIMITS) != WAIT) == has_room


@given(views())
def test_direct_uses_its_rail_and_others_only_without_it(view):
    rail = POLICIES["direct"].choose(view, LIMITS)
    if view.direct & view.usable:
        assert rail == WAIT or view.direct >> rail & 1


@given(views())
def test_spray_uses_the_emptiest_rail(view):
    rail = POLICIES["spray"].choose(view, LIMITS)
    usable = [view.outstanding[each] for each in rails_of(view.usable)]
    if rail == WAIT:
        assert min(usable, default=9) >= LIMITS.direct_depth
    else:
        assert view.outstanding[rail] == min(usable)


def test_without_a_direct_rail_busy_ones_are_better_than_none():
    view = View(direct=0b001, usable=0b110, idle=0b100, outstanding=[0, 0, 2], borrowed=[0, 0, 2])
    assert POLICIES["fuselink"].choose(view, LIMITS) == 1


def test_a_policy_of_no_name():
    with pytest.raises(ValueError, match="fuselink-paper, spray, direct, got 'quick'"):
        policy_named("quick")
    assert isinstance(policy_named("spray"), Policy)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes must be positive, got 0"),
        ({"hold_s": 0}, "hold_s must be positive, got 0"),
        ({"direct_depth": 1}, "direct_depth must be at least direct_first, got 1, 2"),
    ],
)
def test_limits_that_cannot_be(wrong, error):
    with pytest.raises(ValueError, match=error):
        Limits(**wrong)
