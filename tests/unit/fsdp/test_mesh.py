"""Meshes and sharding options without a process group."""

import pytest

from fusco import fsdp


def test_a_mesh_needs_a_process_group():
    with pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group first"):
        fsdp.build_mesh(1)


def test_experts_are_sharded_on_one_of_two_dimensions():
    with pytest.raises(ValueError, match="expert_dim must be 0 or 1, got 2"):
        fsdp.Sharding(expert_dim=2)
