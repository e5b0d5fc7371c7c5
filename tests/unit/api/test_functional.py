"""Collectives without a communicator: arguments that a rank rejects by itself."""

import pytest
import torch

import fusco

ROWS = torch.zeros(4, 2)


def test_there_must_be_a_process_group():
    with pytest.raises(ValueError, match="no process group: call"):
        fusco.all_to_all(torch.empty(4, 2), ROWS)


def test_a_group_that_this_rank_is_not_in():
    outside = torch.distributed.GroupMember.NON_GROUP_MEMBER
    refusal = r"group must be a process group that contains this rank, got -100 \(what new_group returns"
    with pytest.raises(TypeError, match=refusal):
        fusco.all_to_all(torch.empty(4, 2), ROWS, group=outside)
    with pytest.raises(TypeError, match=refusal):
        fusco.Communicator(outside, num_experts=1, num_topk=1, max_tokens_per_rank=1, max_bytes_per_token=1)
