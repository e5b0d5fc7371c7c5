"""Layout of a rank's peer-visible device memory."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given, strategies as st

from fusco import Capacity, ExpertPlacement, Settings, Topology, memory_size_hint
from fusco.cuda.kernels.abi import CHUNK_PAIRS
from fusco.cuda.kernels.copy_experts import copied_bytes
from fusco.cuda.kernels.share_counts import shared_count_bytes
from fusco.cuda.kernels.spares import MAX_SPARE_BYTES
from fusco.cuda.memory.layout import MAX_PAYLOADS, DeviceLayout
from fusco.cuda.tuning import EXCHANGE_CHANNELS, MAX_PARTS

CACHE_LINE = 128
SECTIONS = (
    "routing_ready",
    "rows_released",
    "sums_released",
    "node_ready",
    "rows_ready",
    "sums_ready",
    "exchanged",
    "ids",
    "weights",
    "pool",
    "received",
    "rings",
    "slices",
)


@st.composite
def layouts(draw, least_nodes: int = 1):
    ranks_per_node = draw(st.integers(1, 8))
    topology = Topology.of_equal_nodes(draw(st.integers(least_nodes, 9)) * ranks_per_node, ranks_per_node)
    capacity = Capacity(
        max_tokens_per_rank=draw(st.integers(1, 20) | st.integers(1, 5000)),
        max_bytes_per_token=draw(st.integers(1, 20) | st.integers(1, 20_000)),
        num_topk=draw(st.integers(1, 12)),
    )
    slice_bytes = draw(st.none() | st.integers(1, 300) | st.integers(1, 1 << 21))
    return DeviceLayout(topology, capacity, Settings(slice_bytes=slice_bytes, ring_depth=draw(st.integers(2, 7))))


@st.composite
def splits(draw, layout):
    """Row sizes of several payloads that fit into a token together."""
    room, sizes = layout.capacity.max_row_bytes, []
    for _ in range(draw(st.integers(1, MAX_PAYLOADS))):
        if room:
            sizes.append(draw(st.just(1) | st.just(room) | st.integers(1, room)))
            room -= sizes[-1]
    return sizes


def end_of(layout: DeviceLayout, section: str) -> int:
    """Where the next section begins."""
    following = [*SECTIONS, "end"]
    return layout.offsets[following[following.index(section) + 1]]


@given(layouts())
def test_sections_are_aligned_and_have_the_room_that_kernels_take(layout):
    topology, ranks = layout.topology, layout.topology.ranks_per_node
    rows, pairs = layout.max_rows, layout.max_rows * layout.capacity.num_topk
    assert rows >= layout.capacity.max_tokens_per_rank
    assert layout.max_routing_chunks * CHUNK_PAIRS >= pairs
    taken = {  # as comm.cuh describes them
        "routing_ready": 4 * topology.world_size * layout.max_routing_chunks,
        "rows_released": 4 * ranks,
        "sums_released": 4 * ranks,
        "node_ready": 4 * ranks,
        "rows_ready": 4 * ranks * rows,
        "sums_ready": 4 * ranks * rows * MAX_PARTS,
        "exchanged": 4 * 4 * EXCHANGE_CHANNELS * ranks,
        "ids": 4 * 2 * topology.world_size * pairs,
        "weights": 8 * 2 * topology.world_size * pairs,
        "pool": 0,
        "received": ranks * rows * layout.capacity.max_row_bytes,
        "rings": ranks * layout.ring_depth * layout.slot_bytes,
        "slices": layout.ring_depth * layout.network_slot_bytes if topology.num_nodes > 1 else 0,
    }
    assert list(layout.offsets) == [*SECTIONS, "end"]
    assert all(offset % CACHE_LINE == 0 for offset in layout.offsets.values())
    for section, num_bytes in taken.items():
        assert layout.offsets[section] + num_bytes <= end_of(layout, section), section


@given(layouts(), st.data())
def test_there_is_room_for_pushed_and_forwarded_rows_however_a_token_is_split(layout, data):
    most, num_remote = layout.capacity.max_tokens_per_rank, layout.topology.num_nodes - 1
    num_forwarded = data.draw(st.sampled_from([0, most * num_remote]) | st.integers(0, most * num_remote))
    num_tokens = [data.draw(st.sampled_from([0, most]) | st.integers(0, most)) for _ in range(layout.num_ranks)]
    sizes = data.draw(splits(layout))
    runs = []
    for p, size in enumerate(sizes):
        runs.append((layout.pool_offset(num_forwarded, sizes, p), num_forwarded * size))
        runs += [(layout.received_offset(src, n, sizes, p), n * size) for src, n in enumerate(num_tokens)]
    ends = sorted((first, first + num_bytes) for first, num_bytes in runs)
    assert all(first % CACHE_LINE == 0 for first, _ in ends)
    assert all(end <= first for (_, end), (first, _) in itertools.pairwise(ends))
    assert layout.offsets["pool"] <= ends[0][0]
    assert ends[-1][1] <= end_of(layout, "received")


@given(layouts(least_nodes=2), st.data())
def test_a_slot_of_the_network_takes_any_slice_however_a_token_is_split(layout, data):
    sizes = data.draw(splits(layout))
    rows, num_remote = layout.rows_per_slice(sum(sizes)), layout.topology.num_nodes - 1
    assert rows >= 1
    # Each message begins at a multiple of 16 bytes.
    assert num_remote * sum(-(-rows * size // 16) * 16 for size in sizes) <= layout.network_slot_bytes
    assert layout.network_slot_bytes % CACHE_LINE == 0


@given(layouts(least_nodes=2), st.data())
def test_a_slice_is_as_large_as_is_asked_for_but_never_more_than_the_pool_of_sums_takes(layout, data):
    row_bytes = data.draw(st.integers(1, layout.capacity.max_row_bytes))
    rows, num_remote = layout.rows_per_slice(row_bytes), layout.topology.num_nodes - 1
    # A forwarder holds rows of one rank of each other node at once.
    assert rows * num_remote <= layout.max_rows
    assert rows * num_remote * row_bytes <= max(layout.slice_bytes, num_remote * row_bytes)
    next_larger = (rows + 1) * num_remote
    assert next_larger > layout.max_rows or next_larger * row_bytes > layout.slice_bytes


@given(layouts(least_nodes=2), st.data())
def test_a_forwarder_holds_at_least_a_row_of_each_rank_of_other_nodes(layout, data):
    row_bytes = data.draw(st.integers(1, layout.capacity.max_row_bytes))
    num_others, held = layout.topology.world_size - layout.num_ranks, layout.max_held_rows(row_bytes)
    assert num_others <= held <= layout.max_rows
    assert held * row_bytes <= layout.network_slot_bytes
    assert layout.rows_per_slice(row_bytes) * (layout.topology.num_nodes - 1) <= held
    slots = [layout.slice_offset(number) for number in range(layout.ring_depth + 1)]
    assert slots[-1] == slots[0]
    assert slots[-2] + layout.network_slot_bytes <= layout.offsets["end"]


def test_slices_by_hand():
    capacity = Capacity(max_tokens_per_rank=100, max_bytes_per_token=8, num_topk=1)
    layout = DeviceLayout(Topology((0, 1, 2)), capacity, Settings(slice_bytes=160))
    assert layout.rows_per_slice(8) == 10  # to each of two nodes
    assert layout.rows_per_slice(9) == 8
    assert layout.rows_per_slice(1000) == 1
    assert replace(layout, settings=Settings()).rows_per_slice(8) == 50  # all of them fit into the pool of sums
    one_token = replace(capacity, max_tokens_per_rank=1)
    assert replace(layout, capacity=one_token).rows_per_slice(8) == 1
    assert replace(layout, capacity=one_token).max_rows == 2


@given(layouts(), st.data())
def test_messages_of_a_ring_follow_each_other_and_rings_do_not_overlap(layout, data):
    consumer = data.draw(st.integers(0, layout.num_ranks - 1))
    message = data.draw(st.integers(0, 100))
    first = layout.ring_offset(consumer, message)
    assert first == layout.ring_offset(consumer, message + layout.ring_depth)
    slots = {layout.ring_offset(c, m) for c in range(layout.num_ranks) for m in range(layout.ring_depth)}
    in_order = sorted(slots)
    assert len(slots) == layout.num_ranks * layout.ring_depth
    assert in_order[0] >= layout.offsets["rings"]
    assert all(b - a >= layout.slot_bytes for a, b in itertools.pairwise(in_order))
    assert in_order[-1] + layout.slot_bytes <= layout.offsets["end"]


@given(layouts())
def test_the_hint_is_what_a_rank_takes(layout):
    size = memory_size_hint(layout.topology, layout.capacity, layout.settings, device="cuda")
    assert size.shared_bytes == layout.offsets["end"]
    assert size.private_bytes == MAX_SPARE_BYTES + layout.repeated_routing_bytes
    assert min(size.control_bytes, size.routing_bytes, size.pool_bytes, size.ring_bytes) > 0


def test_places_for_copies_take_slots_of_every_rank():
    topology, capacity = Topology((0,) * 8), Capacity(max_tokens_per_rank=64, max_bytes_per_token=512, num_topk=8)
    full = ExpertPlacement.contiguous(16, 8)
    sizes = [memory_size_hint(topology, capacity, device="cuda", expert_placement=full.in_places(n)) for n in (2, 3)]
    found = sizes[1].ring_bytes - sizes[0].ring_bytes
    assert found == shared_count_bytes(8, 24) - shared_count_bytes(8, 16) + copied_bytes(8)
    assert sizes[0].ring_bytes - memory_size_hint(topology, capacity, device="cuda").ring_bytes == shared_count_bytes(
        8, 16
    )


@given(layouts())
def test_more_nodes_take_more_room_only_for_what_comes_from_them(layout):
    assume(layout.topology.num_nodes > 1)
    ranks, rows = layout.num_ranks, layout.capacity.max_tokens_per_rank
    assume(rows >= layout.topology.world_size - ranks)
    alone = replace(layout, topology=Topology((0,) * ranks))
    ours, theirs = layout.memory_size, alone.memory_size
    assert ours.ring_bytes == theirs.ring_bytes + layout.ring_depth * layout.network_slot_bytes
    forwarded_bytes = rows * (layout.topology.num_nodes - 1) * layout.capacity.max_row_bytes
    assert 0 <= ours.pool_bytes - theirs.pool_bytes - forwarded_bytes <= CACHE_LINE


def test_no_hint_for_other_devices():
    capacity = Capacity(max_tokens_per_rank=1, max_bytes_per_token=1, num_topk=1)
    with pytest.raises(ValueError, match="'cpu' or 'cuda', got 'tpu'"):
        memory_size_hint(Topology((0,)), capacity, device="tpu")
