"""The choice of a rail: hand-written cases, then its laws for any state."""

import ctypes

import pytest
from hypothesis import given, strategies as st

from fusco.rails import POLICIES, Limits, Policy
from fusco.rails.binding import LimitsState, functions
from fusco.rails.policy import policy_named
from fusco.rails.rail import MAX_RAILS

LIMITS = Limits(direct_first=2, direct_depth=4, borrowed_per_rail=2)
FUSELINK, SPRAY, DIRECT = range(3)
WAIT = -1


class View(ctypes.Structure):
    """``struct view``."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("direct", "usable", "idle")),
        *((name, ctypes.c_int * MAX_RAILS) for name in ("outstanding", "borrowed")),
    )


def choose(view, rule=FUSELINK):
    return functions()["choose"](ctypes.byref(view), rule, ctypes.byref(LimitsState(**vars(LIMITS))))


def rails_of(mask):
    return [rail for rail in range(MAX_RAILS) if mask >> rail & 1]


@st.composite
def views(draw):
    num_rails = draw(st.integers(1, 6))
    every = (1 << num_rails) - 1
    chunks = st.tuples(*[st.integers(0, 5)] * num_rails)
    masks = st.integers(0, every)
    return View(draw(st.integers(1, every)), draw(masks), draw(masks), draw(chunks), draw(chunks))


@pytest.mark.parametrize(
    ("outstanding", "borrowed", "expected"),
    [
        ((0, 0, 0, 0), (0, 0, 0, 0), 0),  # the direct rail first
        ((2, 0, 0, 0), (0, 0, 0, 0), 1),  # then idle ones; rail 3 is busy
        ((2, 1, 0, 0), (0, 1, 0, 0), 2),  # the one with less
        ((2, 2, 2, 0), (0, 2, 2, 0), 0),  # at their bound: deeper on the direct one
        ((4, 2, 2, 0), (0, 2, 2, 0), WAIT),
        ((2, 0, 0, 0), (0, 2, 1, 0), 2),  # others borrow rail 1
    ],
)
def test_by_hand(outstanding, borrowed, expected):
    assert choose(View(0b0001, 0b1111, 0b0110, outstanding, borrowed)) == expected


@given(views())
def test_laws_of_fuselink(view):
    rail, direct = choose(view), rails_of(view.direct & view.usable)
    if rail != WAIT and direct and rail not in direct:  # never a busy indirect rail while a direct one works
        assert view.idle >> rail & 1
    if any(view.outstanding[each] < LIMITS.direct_first for each in direct):
        assert rail in direct
    view.idle = view.usable  # work-conserving when all are idle
    has_room = any(view.outstanding[each] < LIMITS.direct_depth for each in direct) or any(
        view.borrowed[each] < LIMITS.borrowed_per_rail for each in rails_of(view.usable & ~view.direct)
    )
    assert (choose(view) != WAIT) == has_room


@given(views(), st.sampled_from([FUSELINK, SPRAY, DIRECT]))
def test_laws_of_all_rules(view, rule):
    rail = choose(view, rule)
    assert rail == WAIT or view.usable >> rail & 1
    if rule != SPRAY and rail != WAIT and not view.direct >> rail & 1:
        assert view.borrowed[rail] < LIMITS.borrowed_per_rail
    if rule == DIRECT and view.direct & view.usable:
        assert rail == WAIT or view.direct >> rail & 1


@given(views())
def test_spray_uses_the_emptiest_rail(view):
    rail = choose(view, SPRAY)
    usable = [view.outstanding[each] for each in rails_of(view.usable)]
    if rail == WAIT:
        assert min(usable, default=9) >= LIMITS.direct_depth
    else:
        assert view.outstanding[rail] == min(usable)


def test_without_a_direct_rail_busy_ones_are_better_than_none():
    assert choose(View(0b001, 0b110, 0b100, (0, 0, 2), (0, 0, 2))) == 1


def test_a_policy_of_no_name():
    with pytest.raises(ValueError, match="fuselink-paper, spray, direct, got 'quick'"):
        policy_named("quick")
    assert isinstance(policy_named("spray"), Policy)
    assert POLICIES["fuselink"].to_text().startswith("rule=fuselink,bound=rail,monitor=activity,defers=True,")


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
