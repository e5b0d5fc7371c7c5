"""Settings and capacities out of range."""

import dataclasses
import itertools
import re
import socket
from datetime import timedelta
from unittest import mock

import pytest
import torch

from fusco import Capacity, ExpertPlacement, Launch, RoutingSizes, Settings, StaticRows
from law import Law


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slice_bytes", 0),
        ("slice_bytes", -1),
        ("ring_depth", 1),
        ("timeout_s", 0.0),
        ("timeout_s", -1.0),
        ("timeout_s", float("nan")),
        ("timeout_s", float("inf")),
        ("timeout_s", -float("inf")),
        ("timeout_s", 1e14),
        ("timeout_s", 1_000_001),
        ("timeout_s", 10**400),
        ("wire_dtype", torch.int32),
        ("wire_dtype", torch.bfloat16),
    ],
)
def test_bad_settings_are_refused_with_their_value(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*, got {re.escape(str(value))}"):
        Settings(**{name: value})


def test_the_maximum_timeout_fits_into_all_types_that_count_it():
    limit_s = Settings(timeout_s=1_000_000).timeout_s
    timedelta(seconds=limit_s)
    with socket.socket() as connection:
        connection.settimeout(limit_s)
    assert limit_s * 1000 < 2**31  # milliseconds of poll
    assert limit_s * 1e9 < 2**63  # nanoseconds of a kernel


@pytest.mark.parametrize("wire_dtype", [None, torch.float32])
def test_good_settings(wire_dtype):
    assert Settings(slice_bytes=1, ring_depth=2, timeout_s=0.1, wire_dtype=wire_dtype).wire_dtype == wire_dtype


def test_settings_are_frozen_and_by_name():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().timeout_s = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        Settings(1024)  # type: ignore[misc]


@pytest.mark.parametrize("name", ["max_tokens_per_rank", "max_bytes_per_token", "num_topk"])
def test_capacities_must_be_positive(name):
    sizes = {"max_tokens_per_rank": 1, "max_bytes_per_token": 1, "num_topk": 1}
    assert Capacity(**sizes).max_row_bytes == 8  # room for the gradient of one weight
    with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
        Capacity(**{**sizes, name: 0})


@pytest.mark.parametrize(
    ("name", "value"), [("slice_bytes", 1.5), ("slice_bytes", "x"), ("ring_depth", 2.5), ("ring_depth", True)]
)
def test_settings_that_count_are_integers(name, value):
    with pytest.raises(TypeError, match=f"{name} must be an integer, got {value!r}"):
        Settings(**{name: value})


@pytest.mark.parametrize("value", ["60", None, True])
def test_a_limit_is_a_number(value):
    with pytest.raises(TypeError, match=f"timeout_s must be a number, got {value!r}"):
        Settings(timeout_s=value)


@pytest.mark.parametrize("num_sms", [1.5, "8", True])
def test_multiprocessors_are_counted(num_sms):
    with pytest.raises(TypeError, match=f"num_sms must be an integer, got {num_sms!r}"):
        Launch(num_sms=num_sms)
    with pytest.raises(ValueError, match="num_sms must be positive, got 0"):
        Launch(num_sms=0)


def test_an_event_is_an_event():
    with pytest.raises(TypeError, match=r"event must be a torch\.cuda\.Event, got 'done'"):
        Launch(event="done")


def test_the_backward_pass_is_on_the_callers_stream_and_records_no_event():
    class Event:
        pass

    with mock.patch.object(torch.cuda, "Event", Event):
        launch = Launch(num_sms=3, own_stream=True, event=Event())
        assert launch.on_callers_stream() == Launch(num_sms=3)


@pytest.mark.parametrize(("num_rows", "error"), [(0, ValueError), (2**31, ValueError), (1.5, TypeError)])
def test_static_rows_are_positive_and_at_most_what_kernels_count(num_rows, error):
    assert StaticRows(2**31 - 1).num_rows == 2**31 - 1
    with pytest.raises(error, match=f"num_rows must be .*, got {num_rows}"):
        StaticRows(num_rows)


@pytest.mark.parametrize(("limit", "error"), [(0, ValueError), (2**31, ValueError), (1.5, TypeError)])
def test_limits_of_messages_are_positive_integers(limit, error):
    assert StaticRows(4, max_rows_to_node=1).max_rows_to_node == 1
    with pytest.raises(error, match="max_rows_to_node"):
        StaticRows(4, max_rows_to_node=limit)


@pytest.mark.parametrize(("limit", "error"), [(0, ValueError), (2**31, ValueError), (1.5, TypeError)])
def test_rows_of_each_expert_are_positive_integers(limit, error):
    assert StaticRows(rows_per_expert=4).rows_per_expert == 4
    with pytest.raises(error, match=f"rows_per_expert must be .*, got {limit}"):
        StaticRows(rows_per_expert=limit)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({}, "num_rows=None and rows_per_expert=None"),
        ({"num_rows": 3, "rows_per_expert": 2}, "num_rows=3 and rows_per_expert=2"),
    ],
)
def test_an_output_has_one_size(sizes, words):
    with pytest.raises(ValueError, match=f"StaticRows takes either num_rows or rows_per_expert, got {words}"):
        StaticRows(**sizes)


def test_the_size_of_an_output():
    assert (StaticRows(7).limit, StaticRows(7).num_slots(3)) == (7, 7)
    masked = StaticRows(rows_per_expert=7)
    assert (masked.limit, masked.num_slots(3), masked.num_slots(0)) == (7, 21, 0)


SIZES = RoutingSizes(max_tokens_per_rank=5, world_size=4, num_topk=3, num_experts=8)


@pytest.mark.parametrize(
    ("skew", "alignment", "num_rows", "rows_per_expert"),
    [
        (None, 1, 40, 20),  # two experts of each rank: 4 * 5 tokens of two of them
        (1.0, 1, 15, 8),  # 60 pairs
        (1.5, 1, 23, 12),
        (1.5, 8, 32, 16),  # 23 + 2 * 7 = 37 rows at most, in blocks of 8
        (100.0, 1, 40, 20),
        (100, 16, 64, 32),
    ],
)
def test_a_size_from_the_skew_of_a_routing(skew, alignment, num_rows, rows_per_expert):
    assert StaticRows.for_rank_load(SIZES, skew, alignment) == StaticRows(num_rows)
    assert StaticRows.for_expert_load(SIZES, skew, alignment) == StaticRows(rows_per_expert=rows_per_expert)


def test_a_size_for_any_routing_is_always_enough_and_may_be_needed():
    """All tokens choose the two experts of rank 0, or one of them."""
    placement = ExpertPlacement.contiguous(8, 4)
    for ids, alignment in itertools.product(([[0, 1, 2]], [[0, 4, 6]]), (1, 8)):
        law = Law([torch.tensor(ids * 5)] * 4, placement.expert_to_rank, alignment)
        assert len(law.slots(0)) <= StaticRows.for_rank_load(SIZES, expert_alignment=alignment).num_rows
    assert len(Law([torch.tensor([[0, 1, 2]] * 5)] * 4, placement.expert_to_rank).slots(0)) == 40


@pytest.mark.parametrize(
    ("skew", "error", "words"),
    [(0.5, ValueError, "at least 1"), (float("nan"), ValueError, "at least 1"), ("2", TypeError, "a number")],
)
def test_a_skew_is_a_ratio_of_at_least_one(skew, error, words):
    with pytest.raises(error, match=f"skew must be {words}.*, got '?{skew}"):
        StaticRows.for_expert_load(SIZES, skew)
    with pytest.raises(ValueError, match="expert_alignment must be positive, got 0"):
        StaticRows.for_rank_load(SIZES, 2.0, 0)


def test_sizes_of_a_routing_are_checked():
    with pytest.raises(ValueError, match="6 experts are not the same number on each of 4 ranks"):
        RoutingSizes(max_tokens_per_rank=1, world_size=4, num_topk=1, num_experts=6)
    with pytest.raises(ValueError, match="num_topk must be positive, got 0"):
        RoutingSizes(max_tokens_per_rank=1, world_size=1, num_topk=0, num_experts=6)
