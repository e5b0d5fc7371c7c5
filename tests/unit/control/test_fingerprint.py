"""Fingerprints of a collective: equal ones pass, all ranks raise alike for the others."""

import pytest

from fusco.control.fingerprint import GROWTH, REJECTION, CollectiveFingerprint, check_fingerprints
from fusco.core.errors import FuscoError, GrowthError, MismatchError, RejectedInputError

GOOD = CollectiveFingerprint("dispatch", {"num_topk": 8, "payloads": ["bfloat16[7]"]})
REFUSED = CollectiveFingerprint("dispatch", rejection="x has shape (3,)")


def test_equal_fingerprints_pass():
    check_fingerprints([GOOD, GOOD, GOOD], rank=1)


def test_different_fields_are_listed_alike_on_all_ranks():
    other = CollectiveFingerprint("dispatch", {"num_topk": 4, "payloads": ["bfloat16[7]"]})
    for rank in range(3):
        with pytest.raises(MismatchError, match=r"in dispatch: num_topk is 8 on ranks 0, 2, 4 on rank 1$"):
            check_fingerprints([GOOD, other, GOOD], rank)


def test_a_field_that_one_rank_lacks():
    with pytest.raises(MismatchError, match="handle is not given on rank 0, 3 on rank 1"):
        check_fingerprints([CollectiveFingerprint("combine"), CollectiveFingerprint("combine", {"handle": 3})], 0)


def test_every_differing_field_is_named():
    other = CollectiveFingerprint("dispatch", {"num_topk": 4, "payloads": ["float32[7]"]})
    with pytest.raises(MismatchError, match=r"num_topk is .*; payloads is "):
        check_fingerprints([GOOD, other], 0)


def test_different_collectives_come_first_even_before_rejections():
    for rank in range(3):
        with pytest.raises(MismatchError, match="different collectives: dispatch on ranks 0, 2, combine on rank 1"):
            check_fingerprints([GOOD, CollectiveFingerprint("combine"), REFUSED], rank)


def test_a_rejection_cancels_the_collective_on_all_others_and_its_fields_are_ignored():
    for rank in (0, 2):
        with pytest.raises(RejectedInputError, match=r"rank 1 rejected its input: x has shape \(3,\)$"):
            check_fingerprints([GOOD, REFUSED, GOOD], rank)
    check_fingerprints([GOOD, REFUSED, GOOD], rank=1)  # it has its own error to raise


@pytest.mark.parametrize(
    ("other", "error", "text"),
    [
        (GOOD, GrowthError, "has no room for the larger dispatch on rank 1$"),
        (CollectiveFingerprint(GROWTH), GrowthError, "has no room for the larger dispatch on ranks 1, 2$"),
        (CollectiveFingerprint("combine"), MismatchError, "collectives: .*, larger dispatch on rank 1, combine"),
        (REFUSED, RejectedInputError, "rank 2 rejected its input"),
        (CollectiveFingerprint(REJECTION, rejection="no memory"), RejectedInputError, "rank 2 .*: no memory$"),
    ],
)
def test_a_larger_dispatch_makes_room_only_among_dispatches_that_nobody_rejects(other, error, text):
    fingerprints = [GOOD, CollectiveFingerprint(GROWTH), other]
    for rank in range(3 if not other.rejection else 2):
        with pytest.raises(error, match=text) as raised:
            check_fingerprints(fingerprints, rank)
        assert type(raised.value) is error
    if other.rejection:
        check_fingerprints(fingerprints, 2)  # it has its own error to raise


def test_both_are_errors_of_fusco_and_of_values():
    for error in (MismatchError, RejectedInputError):
        assert issubclass(error, FuscoError)
        assert issubclass(error, ValueError)


def test_several_rejections_are_all_named():
    with pytest.raises(RejectedInputError, match=r"rank 1 .*; rank 2 "):
        check_fingerprints([GOOD, REFUSED, REFUSED], 0)


def test_fingerprints_survive_being_sent():
    assert CollectiveFingerprint.decode(GOOD.text) == GOOD
    assert CollectiveFingerprint.decode(REFUSED.text) == REFUSED


@pytest.mark.parametrize("letter", ["x", '"', "\\", "\n", "\x01", "é", "漢", "🙂"])
def test_a_rejection_of_any_text_fits_into_a_record(letter):
    text = CollectiveFingerprint("dispatch_again", rejection=f"expected {letter}, got {letter * 5000}").text
    assert len(text) <= 1024
    assert CollectiveFingerprint.decode(text).rejection.startswith("expected ")


def test_a_digest_is_that_of_everything_that_must_agree():
    same = CollectiveFingerprint("dispatch", {"num_topk": 8, "payloads": ["bfloat16[7]"]})
    others = [
        CollectiveFingerprint("combine", GOOD.fields),
        CollectiveFingerprint("dispatch", {**GOOD.fields, "num_topk": 4}),
        CollectiveFingerprint("dispatch", GOOD.fields, "x has shape (3,)"),
        REFUSED,
    ]
    assert same.digest == GOOD.digest
    assert len({GOOD.digest, *(other.digest for other in others)}) == 5


def test_a_handle_is_a_field_of_what_is_read():
    assert CollectiveFingerprint.decode(GOOD.text, handle=3).fields == {**GOOD.fields, "handle": 3}
