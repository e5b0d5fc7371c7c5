"""A rank dies or stops while kernels of the others wait for it: they end, all ranks name it, no GPU hangs."""

import os
import signal

import pytest
import torch
from device_fault_jobs import TIMEOUT_S, replay_until_failure, run_until_failure
from fault_jobs import Fault, die, stop
from on_device import load

import fusco
from fusco.bench.ranks.emulation import emulated_network
from fusco.bench.ranks.local_world import LocalWorld
from fusco.core.environment import may_share_gpus

pytestmark = [pytest.mark.multirank, pytest.mark.cuda_only, pytest.mark.timeout(90 * load())]

SLACK_S, CHECKED_S, COLLECTED_S = 1.5 * load(), 0.1 * load(), 60 * load()
CLOSING_S = 0.75 * TIMEOUT_S + SLACK_S  # half of the limit for launched work, a quarter for NCCL
VICTIM = 1
PLANNING = "fusco.cuda.within_node.programs:DispatchProgram.launch"
SUMMING = "fusco.cuda.within_node.programs:PlanProgram.run"
NETWORK = "fusco.cuda.between_nodes.network:Network.launch"
SETTLING = "fusco.api.communicator:Communicator._settle"
EXACT, STATIC = None, fusco.StaticRows(4096)


def fates_of(fault, static, *, is_host_blind=False, num_nodes=1):
    num_ranks = 4 if torch.cuda.device_count() >= 4 or may_share_gpus() else 2
    ranks_per_node = num_ranks // num_nodes
    return survivors_of(num_ranks, ranks_per_node, run_until_failure, fault, static, is_host_blind, ranks_per_node)


def survivors_of(num_ranks, ranks_per_node, function, *args):
    """Run a function that the victim does not survive; return the results of the others, which end their processes."""
    topology = fusco.Topology.of_equal_nodes(num_ranks, ranks_per_node)
    world = LocalWorld(num_ranks, "cuda", emulated_network(topology, os.environ, torch.cuda.device_count()))
    survivors = [rank for rank in range(num_ranks) if rank != VICTIM]
    try:
        world.start(function, num_ranks, *args)
        fates = world.results(survivors, timeout_s=COLLECTED_S)
    finally:
        os.kill(world.processes[VICTIM].pid, signal.SIGKILL)
        world.close()
    assert [world.processes[rank].exitcode for rank in survivors] == [0] * len(survivors)
    return fates


def assert_all_blame_the_victim(fates, fault, within_s):
    for fate in fates:
        report = f"{fate}, {fate.raised_at - fault.struck_at:.2f} s after the fault"
        assert (fate.kind, fate.peers) == ("PeerFailureError", (VICTIM,)), report
        assert fate.raised_at - fault.struck_at < within_s, report
        assert fate.closing_s < CLOSING_S, report
        assert fate.does_device_work, report


@pytest.mark.parametrize("static", [EXACT, STATIC], ids=["exact", "static"])
@pytest.mark.parametrize("where", [PLANNING, SUMMING], ids=["planning", "summing"])
@pytest.mark.parametrize("how", [die, stop])
def test_a_rank_fails_between_its_record_and_its_kernel(tmp_path, how, where, static):
    fault = Fault(how=how, victims=(VICTIM,), where=where, times=tmp_path)
    fates = fates_of(fault, static)
    assert_all_blame_the_victim(fates, fault, TIMEOUT_S / 2 if how is die else TIMEOUT_S + SLACK_S)


def test_a_device_times_out_by_itself_while_the_host_synchronises(tmp_path):
    fault = Fault(how=stop, victims=(VICTIM,), where=PLANNING, times=tmp_path)
    fates = fates_of(fault, STATIC, is_host_blind=True)
    # The device's timeout, then the host's while it queries the status servers.
    assert_all_blame_the_victim(fates, fault, 2 * TIMEOUT_S + SLACK_S)
    assert any("on the device" in fate.text for fate in fates), fates


@pytest.mark.parametrize("is_host_blind", [False, True], ids=["host polls", "host synchronises"])
@pytest.mark.parametrize("how", [die, stop])
def test_a_rank_fails_while_the_network_of_others_is_busy(tmp_path, how, is_host_blind):
    fault = Fault(how=how, victims=(VICTIM,), where=NETWORK, times=tmp_path)
    fates = fates_of(fault, STATIC, is_host_blind=is_host_blind, num_nodes=2)
    # A host that synchronises notices once the NCCL watchdog has aborted; then it queries the status servers.
    assert_all_blame_the_victim(fates, fault, (1 + is_host_blind) * TIMEOUT_S + SLACK_S)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_rank_that_dies_when_all_devices_are_done_is_no_error(tmp_path, num_nodes):
    fault = Fault(how=die, victims=(VICTIM,), where=SETTLING, times=tmp_path)
    for fate in fates_of(fault, EXACT, num_nodes=num_nodes):
        assert fate.kind == "", fate
        assert fate.closing_s < CLOSING_S, fate
        assert fate.does_device_work, fate


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_is_killed_while_all_replay_graphs(tmp_path, num_ranks):
    struck = tmp_path / "struck"
    for fate in survivors_of(num_ranks, num_ranks, replay_until_failure, VICTIM, struck):
        report = f"{fate}, {fate.raised_at - float(struck.read_text()):.3f} s after the kill"
        assert (fate.kind, fate.peers) == ("PeerFailureError", (VICTIM,)), report
        assert fate.raised_at - float(struck.read_text()) < CHECKED_S, report
        assert fate.num_stale == 0, report
        assert fate.num_right > 0, report
        assert fate.num_poisoned >= 2, report
        assert fate.closing_s < CLOSING_S, report
        assert fate.does_device_work, report
