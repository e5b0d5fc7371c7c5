"""Stages between nodes: every byte in one stage, one partner at a time, and no longer than the bound."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, strategies as st

import fusco
from fusco.schedule import (
    Links,
    choose_mode,
    decompose,
    exact,
    few,
    lanes,
    lower_bound_bytes,
    make_schedule,
    spread_out,
    warm_up,
)
from matrices import families
from timing import relative_time

MAX_INT64 = 2**63 - 1

# FAST's Fig. 9, from its text: D is the bottleneck, receiving 14; in stage 1 of SpreadOut it receives 3 while D -> A
# takes 5; stage 3 makes it wait for 1 unit more; 17 in all.
FIG_9 = np.array([[0, 2, 4, 5], [4, 0, 3, 6], [2, 6, 0, 3], [5, 4, 1, 0]])


def bound_of(matrix) -> int:
    """Return the largest row or column sum, independently of the library."""
    size = len(matrix)
    rows = [sum(int(matrix[i][j]) for j in range(size) if i != j) for i in range(size)]
    columns = [sum(int(matrix[i][j]) for i in range(size) if i != j) for j in range(size)]
    return max(rows + columns)


def check(matrix, stages) -> None:
    """Check that each byte is in one stage, with one partner for each node, and none sends beyond the stage."""
    left = np.array(matrix)
    np.fill_diagonal(left, 0)
    for dst_node, num_bytes, length in zip(stages.dst_node, stages.num_bytes, stages.duration_bytes, strict=True):
        sends = dst_node >= 0
        assert np.all(num_bytes[~sends] == 0)
        assert np.all((num_bytes[sends] > 0) & (num_bytes[sends] <= length))
        assert len(set(dst_node[sends])) == sends.sum()
        left[np.flatnonzero(sends), dst_node[sends]] -= num_bytes[sends]
    assert not left.any()
    assert stages.dst_node.dtype == stages.num_bytes.dtype == stages.duration_bytes.dtype == np.int64


def check_exact(matrix) -> None:
    stages, bound, size = decompose(matrix), bound_of(matrix), len(matrix)
    check(matrix, stages)
    assert stages.total_bytes == bound
    assert stages.num_stages <= size * size - 2 * size + 2
    off_diagonal = np.array(matrix)
    np.fill_diagonal(off_diagonal, 0)
    for node in range(size):
        if sum(off_diagonal[node].tolist()) == bound:
            assert np.array_equal(stages.num_bytes[:, node], stages.duration_bytes), "the busiest sender waits"
        if sum(off_diagonal[:, node].tolist()) == bound:
            received = np.where(stages.dst_node == node, stages.num_bytes, 0).sum(axis=1)
            assert np.array_equal(received, stages.duration_bytes), "the busiest receiver waits"


def check_few(matrix, stages_per_node: float = 3) -> None:
    stages, bound = decompose(matrix, mode="few"), bound_of(matrix)
    check(matrix, stages)
    assert bound <= stages.total_bytes <= bound + bound // 50
    assert stages.num_stages <= stages_per_node * len(matrix)


def test_fig_9():
    assert lower_bound_bytes(FIG_9) == bound_of(FIG_9) == FIG_9[:, 3].sum() == 14
    shifted = spread_out(FIG_9)
    assert shifted.duration_bytes.tolist() == [5, 6, 6]
    assert FIG_9[[2, 1, 0], 3].tolist() == [3, 6, 5]  # what D receives in each stage: it waits for 2, 0 and 1
    assert shifted.total_bytes == 17
    assert decompose(FIG_9).total_bytes == 14
    check(FIG_9, shifted)
    check_exact(FIG_9)
    check_few(FIG_9)


def test_two_nodes_exchange_in_one_stage_each_way_at_once():
    stages = decompose([[0, 7], [7, 0]])
    assert (stages.dst_node.tolist(), stages.num_bytes.tolist()) == ([[1, 0]], [[7, 7]])
    assert stages.duration_bytes.tolist() == [7]


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5, 7, 8, 12, 24])
def test_every_family(num_nodes):
    for seed in range(1 if num_nodes > 16 else 3):
        for matrix in families(num_nodes, seed).values():
            check_exact(matrix)
            check_few(matrix)
            check(matrix, spread_out(matrix))


@pytest.mark.parametrize("num_nodes", [64, 65, 128])
def test_masks_of_more_than_one_word(num_nodes):
    for name in ("uniform", "zipf 0.8, equal sums", "sparse", "geometric permutations"):
        matrix = families(num_nodes)[name]
        check_few(matrix)
        if num_nodes != 128:
            check_exact(matrix)


@st.composite
def any_matrices(draw):
    num_nodes = draw(st.integers(1, 9))
    largest = draw(st.sampled_from([1, 3, 100, 10**6, MAX_INT64 // 16]))
    entries = st.one_of(st.just(0), st.integers(0, largest)) if draw(st.booleans()) else st.integers(0, largest)
    rows = st.lists(entries, min_size=num_nodes, max_size=num_nodes)
    return np.array(draw(st.lists(rows, min_size=num_nodes, max_size=num_nodes)), dtype=np.int64)


@given(any_matrices())
def test_any_matrix(matrix):
    before = matrix.copy()
    check_exact(matrix)
    check_few(matrix)
    assert np.array_equal(matrix, before)


@pytest.mark.parametrize("mode", ["exact", "few"])
def test_the_largest_possible_sums(mode):
    matrix = np.array([[0, MAX_INT64 - 5, 5], [MAX_INT64, 0, 0], [0, 5, 0]])
    stages = decompose(matrix, mode=mode)
    check(matrix, stages)
    assert MAX_INT64 <= stages.total_bytes <= MAX_INT64 + MAX_INT64 // 50


@pytest.mark.parametrize("mode", ["exact", "few"])
def test_stages_do_not_depend_on_the_layout_of_the_matrix(mode):
    matrix = families(8)["uniform"]
    expected = decompose(matrix, mode=mode)
    read_only = matrix.copy()
    read_only.flags.writeable = False
    with_diagonal = matrix + 9 * np.eye(8, dtype=np.int64)
    copies = [matrix.tolist(), matrix.astype(np.int32), matrix.astype(np.uint64), np.asfortranarray(matrix)]
    for same in [*copies, read_only, with_diagonal, np.repeat(matrix, 2, axis=1)[:, ::2]]:
        stages = decompose(same, mode=mode)
        for name in ("dst_node", "num_bytes", "duration_bytes"):
            assert np.array_equal(getattr(stages, name), getattr(expected, name))


# All functions of a node-to-node matrix reject the same.
FUNCTIONS_OF_A_MATRIX = [
    pytest.param(functools.partial(decompose, mode="exact"), id="exact"),
    pytest.param(functools.partial(decompose, mode="few"), id="few"),
    pytest.param(spread_out, id="spread_out"),
    pytest.param(lower_bound_bytes, id="lower_bound_bytes"),
    pytest.param(lambda matrix: choose_mode(matrix, 8, Links()), id="choose_mode"),
]


@pytest.mark.parametrize("function", FUNCTIONS_OF_A_MATRIX)
def test_invalid_matrices_are_rejected(function):
    negative, too_much = np.zeros((2, 3, 3), np.int64)
    negative[2, 1] = -4
    too_much[0] = MAX_INT64 // 2 + 1
    with pytest.raises(ValueError, match="must not be negative, got -4 from node 2 to node 1"):
        function(negative)
    with pytest.raises(ValueError, match="node 0 sends 9223372036854775808 bytes, more than int64 holds"):
        function(too_much)
    with pytest.raises(ValueError, match="node 0 receives 9223372036854775808 bytes"):
        function(too_much.T)
    with pytest.raises(ValueError, match=r"square matrix, got shape \(2, 3\)"):
        function(np.zeros((2, 3), np.int64))
    with pytest.raises(ValueError, match=r"square matrix, got shape \(4,\)"):
        function([1, 2, 3, 4])
    with pytest.raises(ValueError, match="fit into int64, got 18446744073709551615"):
        function(np.full((2, 2), 2**64 - 1, np.uint64))
    with pytest.raises(ValueError, match="fit into int64, got 1180591620717411303424"):
        function([[0, 2**70], [0, 0]])
    with pytest.raises(TypeError, match="must hold integers, got float64"):
        function(np.ones((2, 2)))
    with pytest.raises(TypeError, match="must hold integers, got object"):
        function([[0, None], [0, 0]])


@pytest.mark.parametrize("function", FUNCTIONS_OF_A_MATRIX)
def test_a_matrix_may_be_a_list_with_any_diagonal_that_is_not_negative(function):
    function([[MAX_INT64, 3], [MAX_INT64, MAX_INT64]])


def test_an_unknown_mode_is_rejected():
    with pytest.raises(ValueError, match="mode must be one of 'exact', 'few', got 'best'"):
        decompose(FIG_9, mode="best")


def test_nothing_is_compiled_after_warm_up():
    warm_up()
    kernels = (exact.decompose_exactly, few.decompose_in_few, lanes.cut_into_lanes, lanes.cut_into_stages)
    before = [len(kernel.signatures) for kernel in kernels]
    for num_nodes in (1, 3, 8):
        for mode in ("exact", "few", "spread-out"):
            topology = fusco.Topology.of_equal_nodes(num_nodes * 2, 2)
            make_schedule(families(num_nodes * 2)["sparse"], topology, mode=mode)
    assert [len(kernel.signatures) for kernel in kernels] == before


@pytest.mark.parametrize("mode", ["exact", "few"])
def test_no_nodes_no_stages(mode):
    stages = decompose(np.zeros((0, 0), np.int64), mode=mode)
    assert (stages.num_stages, stages.num_nodes, stages.total_bytes) == (0, 0, 0)


def test_fusco_has_the_module_as_an_attribute():
    assert fusco.schedule.decompose is decompose


# In loops of 3.4 us on an idle AMD EPYC, where these take 2.6 (9 us), 145 and 156; the last takes 374 on a Xeon of 2.5
# GHz. The limits in us on the EPYC, 12.3, 610 and 1530, are below a quarter and a tenth of FAST's C++ figures, the
# targets of the modes.
@pytest.mark.parametrize(("mode", "num_nodes", "limit"), [("exact", 8, 3.6), ("exact", 40, 180), ("few", 40, 450)])
def test_it_is_fast(mode, num_nodes, limit):
    warm_up()
    matrices = [families(num_nodes, seed)["uniform"] for seed in range(10)]
    assert relative_time(functools.partial(decompose, mode=mode), matrices) < limit
