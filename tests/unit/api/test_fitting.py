"""What makes ranks make room, as the others would not come after anything else."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest

from fusco import Capacity, MismatchError, RejectedInputError, RowOverflowError
from fusco.api.growth import Growing
from fusco.control.fingerprint import GROWTH
from fusco.core.errors import GrowthError

SMALL, LARGE = (Capacity(num_topk=1, max_tokens_per_rank=tokens, max_bytes_per_token=1) for tokens in (1, 2))


class Room(Growing):
    """A communicator with room for one token, then for two, which agrees to everything."""

    def __init__(self) -> None:
        self._validator = SimpleNamespace(capacity=SMALL, is_capturing=False)
        self._owners = SimpleNamespace(batch="planned")
        self.agree = mock.Mock()
        self.made_room = mock.Mock()

    def _make_room(self, need):
        self.made_room(need)
        self._validator.capacity, self._owners = LARGE, SimpleNamespace(batch=None)


@pytest.mark.parametrize(
    ("error", "grows"),
    [
        (GrowthError("on another rank"), True),
        (MismatchError("out of step"), False),
        (RejectedInputError("of another rank"), False),
        (ValueError("too many tokens"), False),
        (MemoryError("on this rank"), False),
        (RowOverflowError(0, 1, 2), False),
    ],
)
def test_ranks_make_room_only_for_size(error, grows):
    room, call = Room(), mock.Mock(side_effect=[error, "sent"])
    if grows:
        assert room.fitting(SMALL, call) == "sent"
        assert room._owners.batch == "planned"
    else:
        with pytest.raises(type(error)):
            room.fitting(SMALL, call)
    assert room.made_room.called is grows


@pytest.mark.parametrize("others", [None, GrowthError("on ranks 0, 1")])
def test_a_dispatch_without_room_is_not_called_before_there_is(others):
    room, call = Room(), mock.Mock(return_value="sent")
    room.agree.side_effect = others  # equal records of all ranks are not compared
    assert room.fitting(LARGE, call) == "sent"
    room.agree.assert_called_once_with(GROWTH)
    room.made_room.assert_called_once_with(LARGE)
    call.assert_called_once_with()


def test_sizes_are_compared_field_by_field():
    wide = Capacity(num_topk=1, max_tokens_per_rank=3, max_bytes_per_token=5)
    deep = Capacity(num_topk=4, max_tokens_per_rank=2, max_bytes_per_token=5)
    both = Capacity(num_topk=4, max_tokens_per_rank=3, max_bytes_per_token=5)
    assert wide.union(deep) == both
    assert both.holds(wide)
    assert both.holds(both)
    assert not wide.holds(deep)
    assert [both.with_reserve().max_tokens_per_rank, LARGE.with_reserve().max_tokens_per_rank] == [4, 2]
