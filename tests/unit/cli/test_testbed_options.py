"""Options of a benchmark on a testbed."""

import pytest

from fusco.cli.testbed import BenchTestbed
from fusco.testbed import Layout


def test_a_testbed_says_nodes_ranks_and_rate():
    bed = BenchTestbed.of("4x2", "500mbit", 4)
    assert bed.layout == Layout(num_hosts=4, num_rails=4, rate=500_000_000, ranks_per_host=2)
    assert bed.rank_gbs == 0.125  # two rails for each rank
    assert bed.choose_shape(None, None) == bed.choose_shape(4, 2) == (4, 2)


def test_without_a_testbed_nothing_changes():
    bed = BenchTestbed.of(None, None, None)
    assert bed.rank_gbs == 0.0
    assert bed.choose_shape(3, None) == (3, None)
    bed.run_there()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("4", None, None), "--testbed '4' is not a number of hosts"),
        (("2x2", "fast", None), "'fast' is no rate"),
        (("2x2", None, 3), "3 rails of a host do not divide among 2 ranks"),
        ((None, "1gbit", None), "--rate 1gbit goes with --testbed"),
        ((None, None, 2), "--rails 2 goes with --testbed"),
    ],
)
def test_options_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        BenchTestbed.of(*arguments)


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match="--testbed 4x2 already says"):
        BenchTestbed.of("4x2", None, None).choose_shape(2, None)


def test_ranks_of_a_launcher_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="leave out torchrun"):
        BenchTestbed.of("4x2", None, None).run_there()
