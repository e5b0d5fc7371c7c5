"""Checks of callers' expert ids, compiled by ``fusco warm-up``."""

import pytest
import torch

from fusco.core import checked_ids
from fusco.core.checked_ids import require_ranks_of, warm_up_checked_ids


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_nothing_is_compiled_after_warm_up(dtype):
    warm_up_checked_ids()
    before = len(checked_ids._first_contradiction.signatures)
    ids = torch.tensor([[0, 3], [-1, 1]], dtype=dtype)
    require_ranks_of(ids, torch.tensor([[True, True], [True, False]]), num_experts=4)
    with pytest.raises(ValueError, match=r"is_token_in_rank\[1\] is true for ranks \[0, 1\]"):
        require_ranks_of(ids.T.contiguous().T, torch.tensor([[True, True], [True, True]]), num_experts=4)
    assert len(checked_ids._first_contradiction.signatures) == before == 1
