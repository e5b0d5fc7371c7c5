"""Ranks with different numbers of NICs: shares of rows follow them, and every rank has memory for its share."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fusco import BALANCERS, Capacity, Settings, Topology, Traffic
from fusco.core.config import EngineConfig
from fusco.cpu.layout import CpuLayout
from fusco.cuda.memory.layout import DeviceLayout
from fusco.engine.agreed_lanes import agreed_lanes
from fusco.rails.rail import links_of_ranks

NETWORKS = [7, 7, 8, 8]  # of two hosts


@st.composite
def configurations(draw):
    num_nodes, ranks_per_node = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    topology = Topology.of_equal_nodes(num_nodes * ranks_per_node, ranks_per_node)
    networks = draw(st.lists(st.integers(1, 2), min_size=topology.world_size, max_size=topology.world_size))
    links = links_of_ranks(topology, networks, draw(st.integers(1, 6)))
    capacity = Capacity(max_tokens_per_rank=draw(st.sampled_from([40, 1000])), max_bytes_per_token=8, num_topk=1)
    return EngineConfig(topology, capacity, Settings(), links)


@given(configurations(), st.integers(0, 1 << 30), st.floats(0.2, 3.0))
def test_every_rank_has_memory_for_its_share(config, seed, skew):
    topology, random = config.topology, np.random.default_rng(seed)
    counts = (random.beta(skew, 0.2, (topology.world_size, topology.num_nodes)) * 2).clip(0, 1)
    counts = (counts * config.capacity.max_tokens_per_rank).astype(int).tolist()
    traffic = Traffic.from_counts(topology, counts, config.rank_links)
    lanes = {
        agreed_lanes(mock.Mock(), BALANCERS["lanes"], traffic, layout.of(config).max_crossing_rows).num_moved
        for layout in (CpuLayout, DeviceLayout)
    }
    assert len(lanes) == 1


def test_without_rails_of_different_numbers_nothing_changes():
    topology = Topology.of_equal_nodes(4, 2)
    assert links_of_ranks(topology, NETWORKS, num_rails=4) is None
    assert links_of_ranks(topology, NETWORKS, num_rails=1) is None
    assert links_of_ranks(topology, [1, 2, 3, 4], num_rails=3) is None


@pytest.mark.parametrize("num_rails", [3, 5])
def test_each_nic_has_the_same_share_of_full_traffic(num_rails):
    topology = Topology.of_equal_nodes(4, 2)
    links = links_of_ranks(topology, NETWORKS, num_rails)
    assert links == ((num_rails // 2 + 1, num_rails // 2),) * 2
    capacity = Capacity(max_tokens_per_rank=3000, max_bytes_per_token=8, num_topk=1)
    config = EngineConfig(topology, capacity, Settings(), links)
    traffic = Traffic.from_counts(topology, [[0, 3000], [0, 3000], [3000, 0], [3000, 0]], links)
    lanes = agreed_lanes(mock.Mock(), BALANCERS["lanes"], traffic, CpuLayout.of(config).max_crossing_rows)
    for rows in (lanes.sent_rows, lanes.received_rows):
        np.testing.assert_allclose(rows / np.array(links).ravel(), 6000 / num_rails, rtol=1 / 64)
