"""A rank dies or stops while kernels of the others wait for it: they end, everybody says who it was, no GPU hangs."""

import os
import signal

import pytest
import torch
from device_fault_jobs import endure
from fault_jobs import TIMEOUT_S, Fault, die, stop

import fusco
from fusco.bench.local_world import LocalWorld

pytestmark = [pytest.mark.multirank, pytest.mark.cuda_only, pytest.mark.timeout(90)]

SLACK_S, CLOSING_S = 1.5, 3.0
VICTIM = 1
PLANNING = "fusco.engine.cuda.kernels:Kernels.plan"
STAGING = "fusco.engine.cuda.kernels:Kernels.stage"
SUMMING = "fusco.engine.cuda.kernels:Kernels.combine"
EXACT, STATIC = None, fusco.StaticSlots(4096)


def fates_of(fault, static, is_host_blind=False):
    num_ranks = max(2, min(4, torch.cuda.device_count()))
    world = LocalWorld(num_ranks, "cuda")
    survivors = [rank for rank in range(num_ranks) if rank != VICTIM]
    try:
        world.start(endure, num_ranks, fault, static, is_host_blind)
        outcomes = world.collect(survivors, timeout_s=60)
    finally:
        os.kill(world.processes[VICTIM].pid, signal.SIGKILL)
        world.close()
    assert all(is_ok for is_ok, _ in outcomes), outcomes
    assert [world.processes[rank].exitcode for rank in survivors] == [0] * len(survivors)
    return [fate for _, fate in outcomes]


def assert_all_blame_the_victim(fates, fault, within_s):
    for fate in fates:
        report = f"{fate}, {fate.raised_at - fault.struck_at:.2f} s after the fault"
        assert (fate.kind, fate.peers) == ("PeerFailureError", (VICTIM,)), report
        assert fate.raised_at - fault.struck_at < within_s, report
        assert fate.closing_s < CLOSING_S, report
        assert fate.does_device_work, report


@pytest.mark.parametrize("static", [EXACT, STATIC], ids=["exact", "static"])
@pytest.mark.parametrize("where", [PLANNING, STAGING, SUMMING], ids=["planning", "staging", "summing"])
@pytest.mark.parametrize("how", [die, stop])
def test_a_rank_fails_between_its_word_and_its_kernel(tmp_path, how, where, static):
    fault = Fault(how=how, victims=(VICTIM,), where=where, times=tmp_path)
    fates = fates_of(fault, static)
    assert_all_blame_the_victim(fates, fault, TIMEOUT_S / 2 if how is die else TIMEOUT_S + SLACK_S)


def test_a_device_gives_up_by_itself_where_the_host_does_not_look(tmp_path):
    fault = Fault(how=stop, victims=(VICTIM,), where=PLANNING, times=tmp_path)
    fates = fates_of(fault, STATIC, is_host_blind=True)
    # The device's limit, then the host's to ask around.
    assert_all_blame_the_victim(fates, fault, 2 * TIMEOUT_S + SLACK_S)
    assert any("on the device" in fate.text for fate in fates), fates
