"""The CUDA kernels themselves, under the code that launches them: on the CPU, in any order that they allow.

``test_internode`` runs the same scenes with the kernels' twins. Here every wait, flag, barrier and share of work is
the kernels' own. (On a GPU: ``tests/cuda`` and ``tests/multirank --device cuda``.)
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulated_scenes import EmulatedPlay
from emulator import is_available
from scenes import PAYLOADS, Play, Scene

from comparison import assert_same_bits
from fusco.core.rows import ROW_DTYPES
from fusco.cuda import tuning
from fusco.cuda.kernels import combine_rows as combine_kernel, plan as plan_kernel
from generator import KINDS

pytestmark = [
    pytest.mark.skipif(not is_available, reason="needs a C++ compiler, g++ or clang++"),
    pytest.mark.usefixtures("as_many_blocks_as_for_many_tokens"),
]


def play(scene: Scene, folder, order: int = 0, **sizes: int) -> None:
    whole = EmulatedPlay(scene, folder, **sizes)
    whole.check(whole.run(order))


@pytest.mark.parametrize("number", range(len(KINDS)), ids=KINDS)
def test_within_and_between_nodes_and_with_masked_rows(number, folder):
    order = number % 3
    within = Scene(num_nodes=1, ranks_per_node=(2, 3, 8, 1)[number % 4], kind=KINDS[number], seed=order)
    num_nodes, ranks_per_node = ((2, 2), (3, 1), (2, 3))[order]
    between = replace(within, num_nodes=num_nodes, ranks_per_node=ranks_per_node)
    masked = replace((within, between)[number % 2], rows_per_expert=(4, 1, 32)[order])
    for scene in (within, between, masked):
        play(scene, folder, order)


@pytest.mark.parametrize("number", range(10))
def test_dtypes_widths_and_ways_to_have_rows(number, folder):
    changes = [
        {"payloads": PAYLOADS[1]},
        {"payloads": PAYLOADS[2], "alignment": 4, "is_static": True},
        {"payloads": PAYLOADS[3], "is_weighted": False},
        {"dtype": torch.float64, "hidden": 1},
        {"dtype": torch.float16, "hidden": 8},
        {"dtype": torch.bfloat16, "wire_dtype": torch.float32, "hidden": 300},
        {"dtype": torch.float32, "hidden": 33, "is_static": True},
        {"dtype": torch.float16, "wire_dtype": torch.float32, "alignment": 4},
        {"rows_per_expert": 3},
        {"rows_per_expert": 64, "alignment": 4, "payloads": PAYLOADS[2]},
    ][number]
    kind, num_nodes, ranks_per_node = [("ragged with holes", 1, 4), ("skewed", 2, 2)][number % 2]
    scene = Scene(num_nodes=num_nodes, ranks_per_node=ranks_per_node, kind=kind, seed=4 + number % 2, **changes)
    play(scene, folder, order=number % 2)


def test_many_rows_for_each_warp(folder, monkeypatch):
    """Rows are not shared among warps then."""
    monkeypatch.setattr(tuning, "ROWS_FOR_ALL_WARPS", 1)
    play(Scene(num_nodes=1, ranks_per_node=4, kind="balanced", seed=2), folder, order=2)


def test_a_plan_of_one_block_with_more_pairs_than_it_keeps(folder, monkeypatch):
    monkeypatch.setattr(plan_kernel, "plan_shape", lambda _: (512, 1))
    for order, kind in enumerate(("ragged with holes", "skewed")):
        play(Scene(num_nodes=1, ranks_per_node=4, kind=kind, seed=order), folder, order)


@pytest.mark.parametrize(("seed", "dtype"), list(enumerate(ROW_DTYPES)), ids=str)
def test_sums_have_the_bits_of_the_twins(seed, dtype, folder):
    kind = ("balanced", "ragged with holes", "repeated experts")[seed % 3]
    scene = Scene(num_nodes=2, ranks_per_node=2, kind=kind, seed=seed, dtype=dtype, hidden=17)
    emulated, twins = EmulatedPlay(scene, folder).run(seed), Play(scene).run(seed)
    for rank, (ours, theirs) in enumerate(zip(emulated, twins, strict=True)):
        for one, other in zip(ours.sums, theirs.sums, strict=True):
            assert_same_bits(one, other, f"sums of rank {rank}")


@pytest.mark.parametrize("order", range(2))
def test_a_few_resident_blocks_of_a_grid_do_all_that_others_wait_for(folder, order, monkeypatch):
    """As with concurrent kernels that wait for other ranks: only one of combine's blocks is resident."""
    monkeypatch.setattr(combine_kernel, "combine_shape", lambda *_: tuning.RingShape(512, 3, 2, 3))
    play(Scene(num_nodes=1, ranks_per_node=3 + order % 2, kind="balanced", seed=order), folder, order, num_sms=1)


@pytest.mark.parametrize("max_resident", [2, 40])
def test_few_rows_are_spread_over_all_blocks_of_which_any_may_be_resident(folder, max_resident, monkeypatch):
    """Each warp begins with an item or has none, and takes others only while it waits."""
    monkeypatch.setattr(plan_kernel, "plan_shape", lambda _: (512, 1))
    for order, kind in enumerate(("ragged with holes", "skewed")):
        scene = Scene(num_nodes=1, ranks_per_node=2 + order, kind=kind, seed=order)
        play(scene, folder, order, num_sms=40, max_resident=max_resident)
