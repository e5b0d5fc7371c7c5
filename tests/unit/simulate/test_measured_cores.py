"""What ``--measure`` finds about cores where calls take exactly the time that the model says."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from fusco.bench.simulation import measure
from fusco.simulate.cluster import Cluster, Constant
from fusco.simulate.demand import Demand
from fusco.simulate.run import simulate

TRUE = {"nvl_gbs": 4.0, "memory_gbs": 4.0, "core_gbs": 1.5, "start_us": 300.0, "plan_us": 200.0}
LATENCIES = {"latency_us": 50.0, "stage_us": 50.0}


@pytest.fixture
def played(monkeypatch):
    """Return a function that sets the true cluster, in whose time calls are answered, and asks what is measured."""
    state = SimpleNamespace(truth=None, demand=None, call="dispatch")

    def least_s(work, *_):
        work()
        if state.demand is None:
            return measure._MEMORY_BYTES / TRUE["memory_gbs"] / 1e9
        return simulate(state.truth, state.demand, "fusco", state.call, "bound").makespan_ms / 1e3

    def called(call):
        state.call = call
        return SimpleNamespace(rows=None, handle=None)

    def of_routing(*arguments):
        state.demand = Demand.of_routing(*arguments)
        return state.demand

    comm = SimpleNamespace(dispatch=lambda *_: called("dispatch"), combine=lambda *_: called("combine"))
    monkeypatch.setattr(measure, "Communicator", lambda *_, **__: nullcontext(comm))
    monkeypatch.setattr(measure, "RankTimer", lambda *_: SimpleNamespace(least_s=least_s))
    monkeypatch.setattr(measure, "Demand", SimpleNamespace(of_routing=of_routing))
    monkeypatch.setattr(dist, "get_rank", lambda _group: 0)

    def measured(nic_gbs: float) -> Cluster:
        state.demand, links = None, {"nic_gbs": nic_gbs, "nvl_gbs": TRUE["nvl_gbs"], **LATENCIES}
        known = Cluster(
            name="known",
            nodes=2,
            ranks_per_node=2,
            machines=1,
            constants={k: Constant(value=v) for k, v in links.items()},
        )
        state.truth = known.with_values("true", **TRUE)
        return measure.measure_machine(None, known, "cpu")

    return measured


@pytest.mark.parametrize("nic_gbs", [0.01, 0.1, 10.0])
def test_the_constants_of_a_model_are_found_again_over_any_network(played, nic_gbs):
    found = played(nic_gbs)
    assert {name: found.constants[name].value for name in TRUE} == pytest.approx(TRUE, rel=0.02)
    share = found.constants["core_gbs"].source.split(", ")[1].split("%")[0]
    # Where the network needs more than half of the cores' time, other nodes get fewer rows.
    assert (int(share) < 100) == (nic_gbs < 1)
