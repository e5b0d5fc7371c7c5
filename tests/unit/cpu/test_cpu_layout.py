"""Layout of a rank's shared segment."""

from __future__ import annotations

import itertools
from dataclasses import astuple

import pytest
from hypothesis import given, strategies as st

from fusco import Capacity, Settings, Topology, memory_size_hint
from fusco.control.layout import SegmentSizes
from fusco.control.shared_segment import SharedSegment
from fusco.cpu.layout import CpuLayout

CACHE_LINE = 64


@st.composite
def layouts(draw):
    ranks_per_node = draw(st.integers(1, 9))
    topology = Topology.of_equal_nodes(draw(st.integers(1, 9)) * ranks_per_node, ranks_per_node)
    capacity = Capacity(
        max_tokens_per_rank=draw(st.integers(1, 5000)),
        max_bytes_per_token=draw(st.integers(1, 20_000)),
        num_topk=draw(st.integers(1, 12)),
    )
    settings = Settings(slice_bytes=draw(st.integers(1, 1 << 21)), ring_depth=draw(st.integers(2, 7)))
    return CpuLayout(topology, capacity, settings)


def sections(layout: CpuLayout) -> list[tuple[int, int]]:
    """First and end byte of every section of a segment."""
    num_nodes, tokens = layout.topology.num_nodes, layout.capacity.max_tokens_per_rank
    ids = 4 * tokens * layout.capacity.num_topk
    parts = [(0, layout.control.flags_bytes)]
    parts += [(layout.control.record_offset(node), layout.control.record_bytes) for node in range(num_nodes)]
    attachment_bytes = layout.control.attachment_bytes
    parts += [(layout.control.attachment_offset(node), attachment_bytes) for node in range(num_nodes)]
    for region in range(num_nodes):
        parts += [(layout.ids_offset(region), ids), (layout.weights_offset(region), 2 * ids)]
    parts.append((layout.pool_offset, tokens * layout.capacity.max_row_bytes))
    parts.append((layout.crossing_offset, layout.max_crossing_rows * layout.capacity.max_row_bytes))
    for consumer in range(layout.topology.ranks_per_node):
        slots = range(layout.settings.ring_depth)
        parts += [(layout.ring_offset(consumer, slot), layout.slot_bytes) for slot in slots]
    return [(first, first + num_bytes) for first, num_bytes in parts]


def flag_indices(layout: CpuLayout) -> list[int]:
    nodes, locals_ = range(layout.topology.num_nodes), range(layout.topology.ranks_per_node)
    return [
        layout.control.done_flag,
        *map(layout.control.record_flag, nodes),
        *map(layout.routing_flag, nodes),
        *map(layout.arrival_flag, nodes),
        *map(layout.control.produced_flag, locals_),
        *map(layout.control.consumed_flag, locals_),
    ]


@given(layouts())
def test_sections_are_aligned_and_do_not_overlap(layout):
    ordered = sorted(sections(layout))
    assert all(first % CACHE_LINE == 0 for first, _ in ordered)
    assert all(end <= first for (_, end), (first, _) in itertools.pairwise(ordered))
    assert ordered[-1][1] <= layout.num_bytes


@given(layouts())
def test_every_flag_has_a_separate_place(layout):
    indices = flag_indices(layout)
    assert len(set(indices)) == len(indices)
    assert min(indices) >= 0
    assert 8 * (max(indices) + 1) <= layout.control.flags_bytes


@given(layouts())
def test_the_hint_equals_the_size_of_the_layout(layout):
    size = memory_size_hint(layout.topology, layout.capacity, layout.settings)
    assert size.shared_bytes == layout.num_bytes
    assert size.total_bytes == sum(astuple(size))
    assert min(astuple(size)) > 0
    num_remote = layout.topology.world_size - layout.topology.ranks_per_node
    assert size.private_bytes == (layout.settings.ring_depth + 2 * num_remote + 2) * layout.slot_bytes


@given(layouts())
def test_a_slot_has_room_for_a_row_of_sums_twice_as_wide(layout):
    assert layout.slot_bytes >= layout.settings.slice_bytes
    assert layout.rows_per_slot(2 * layout.capacity.max_row_bytes) >= 1


@given(layouts(), st.data())
def test_a_rank_has_a_region_for_each_node_and_its_node_comes_first(layout, data):
    nodes = range(layout.topology.num_nodes)
    local_node = data.draw(st.sampled_from(nodes))
    assert sorted(layout.region_of(local_node, node) for node in nodes) == list(nodes)
    assert layout.region_of(local_node, local_node) == 0


def test_a_record_has_room_for_the_sizes_of_a_shuffle_with_all_ranks():
    capacity = Capacity(max_tokens_per_rank=1, max_bytes_per_token=1, num_topk=1)
    layout = CpuLayout(Topology.of_equal_nodes(72, 8), capacity, Settings())
    assert layout.control.record_ints >= 2 + 2 * 72


@pytest.mark.parametrize(
    ("num_nodes", "tokens", "slice_bytes", "is_attached"),
    [
        (2, 64, None, True),
        (1, 64, None, False),  # no other node
        (2, 1024, None, False),  # more than 128 KiB
        (8, 64, None, True),  # less to each node
        (2, 64, 1000, False),  # several slices
    ],
)
def test_rows_are_attached_to_records_if_they_are_few_and_one_slice(num_nodes, tokens, slice_bytes, is_attached):
    capacity = Capacity(max_tokens_per_rank=tokens, max_bytes_per_token=1024, num_topk=8)
    settings = Settings() if slice_bytes is None else Settings(slice_bytes=slice_bytes)
    layout = CpuLayout(Topology.of_equal_nodes(2 * num_nodes, 2), capacity, settings)
    needed = tokens * (1024 + 8 * (4 + 8))  # rows, ids, weights of float64
    assert layout.control.attachment_bytes == (needed if is_attached else 0)


@pytest.mark.parametrize(
    ("num_nodes", "ring_depth", "can"), [(2, 2, True), (16, 2, True), (17, 2, False), (1, 4, False)]
)
def test_sums_are_attached_if_a_ring_has_room_for_those_of_all_nodes(num_nodes, ring_depth, can):
    """Sums of 64 rows of each node, in float32: 128 KiB."""
    capacity = Capacity(max_tokens_per_rank=64, max_bytes_per_token=1024, num_topk=8)
    settings = Settings(slice_bytes=1 << 20, ring_depth=ring_depth)
    layout = CpuLayout(Topology.of_equal_nodes(2 * num_nodes, 2), capacity, settings)
    assert layout.can_attach_sums == can
    if can:
        end_of_sums = layout.ring_offset(1, 0) + num_nodes * 64 * 2 * 1024
        assert end_of_sums <= layout.num_bytes


@given(layouts())
def test_control_comes_first_and_has_the_size_it_reports(layout):
    sizes, control = layout.segment_sizes, layout.control
    assert control.record_offset(layout.topology.num_nodes) == control.num_bytes <= layout.ids_offset(0)
    assert (sizes.control, sizes.num_bytes) == (control, layout.num_bytes)
    assert sizes.private_bytes == layout.memory_size.private_bytes


@given(layouts())
def test_without_data_there_are_flags_and_records_only(layout):
    sizes = SegmentSizes.of_control(layout.topology)
    assert sizes.num_bytes == sizes.control.num_bytes <= layout.control.num_bytes
    assert 8 * sizes.control.consumed_flag(layout.topology.ranks_per_node - 1) < sizes.control.flags_bytes


def test_tags_grow_with_the_collective_first():
    assert CpuLayout.tag(3, 0) < CpuLayout.tag(3, 1) < CpuLayout.tag(3, (1 << 32) - 1) < CpuLayout.tag(4, 0)


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_the_hint_equals_the_size_of_a_real_segment(ranks_per_node):
    topology = Topology.of_equal_nodes(4, ranks_per_node)
    capacity = Capacity(max_tokens_per_rank=100, max_bytes_per_token=500, num_topk=3)
    size = memory_size_hint(topology, capacity, Settings(slice_bytes=4096))
    with SharedSegment.create(size.shared_bytes) as segment:
        assert len(segment.memory) == segment.address.num_bytes == size.shared_bytes
