"""Options of a benchmark on a testbed."""

import pytest

from fusco.cli.testbed import PlaceOptions
from fusco.testbed import Layout


def test_a_testbed_says_nodes_ranks_and_rate():
    place = PlaceOptions(testbed="4x2", rate="500mbit", rails=4)
    assert place.layout == Layout(num_hosts=4, num_rails=4, rate=500_000_000, ranks_per_host=2)
    assert place.rank_gbs == 0.125  # two rails for each rank
    for given in ({}, {"nodes": 4, "ranks_per_node": 2}):
        topology = PlaceOptions(testbed="4x2", **given).topology()
        assert (topology.num_nodes, topology.ranks_per_node) == (4, 2)


def test_without_a_testbed_nothing_changes():
    place = PlaceOptions(nodes=3)
    assert place.rank_gbs == 0.0
    assert (place.topology().num_nodes, place.topology().ranks_per_node) == (3, 2)
    assert PlaceOptions().topology(num_cpu_nodes=1).num_nodes == 1
    place.run_there()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"testbed": "4"}, "--testbed '4' is not a number of hosts"),
        ({"testbed": "2x2", "rate": "fast"}, "'fast' is not a rate"),
        ({"testbed": "2x2", "rails": 3}, "3 rails of a host do not divide among 2 ranks"),
        ({"rate": "1gbit"}, "--rate 1gbit goes with --testbed"),
        ({"rails": 2}, "--rails 2 goes with --testbed"),
        ({"testbed": "4x2", "nodes": 2}, "--testbed 4x2 already says"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        PlaceOptions(**options).topology()


def test_ranks_of_a_launcher_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="leave out torchrun"):
        PlaceOptions(testbed="4x2").run_there()
