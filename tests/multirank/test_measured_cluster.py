"""``fusco simulate --measure``: the ranks of a job write their cluster, which is read back."""

from __future__ import annotations

import pytest
from launching import launch

from fusco.simulate.cluster import load_cluster


@pytest.mark.multirank
def test_a_job_measures_its_cluster(tmp_path):
    path = tmp_path / "mine.toml"
    options = ["simulate", "--measure", str(path), "--nodes", "2", "--ranks-per-node", "1"]
    done = launch(2, "fusco", options, tmp_path / "logs")
    assert done.is_ok, done.stderr
    cluster = load_cluster(str(path))
    assert (cluster.name, cluster.nodes, cluster.ranks_per_node, cluster.machines) == ("mine", 2, 1, 1)
    measured = {"nic_gbs", "latency_us", "stage_us", "memory_gbs", "core_gbs", "start_us", "plan_us"}
    assert set(cluster.constants) == measured
    assert all(cluster.constants[name].value > 0 for name in measured - {"start_us", "plan_us"})
    assert all(constant.source.startswith(("measured", "as ")) for constant in cluster.constants.values())
