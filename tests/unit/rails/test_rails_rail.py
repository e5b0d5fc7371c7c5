"""Rails of a host: what they may be, and what is discovered."""

import pytest

from fusco.rails import Rail, discover_rails
from fusco.rails.rail import check_rails, configured_rails


def test_the_loopback_device_is_a_rail_if_it_is_named():
    (rail,) = discover_rails(["lo"], num_workers=3)
    assert (rail.interface, rail.address, rail.owners) == ("lo", "127.0.0.1", (0, 1, 2))


def test_interfaces_that_do_not_exist():
    with pytest.raises(ValueError, match="interface nothing0 is missing or down"):
        discover_rails(["lo", "nothing0"])


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (("", "10.0.0.1", (0,)), "interface must have 1 to 15 bytes, got ''"),
        (("an-interface-of-20b", "10.0.0.1", (0,)), "1 to 15 bytes"),
        (("eth0", "10.0.0", (0,)), "'10.0.0' does not appear to be an IPv4 or IPv6 address"),
        (("eth0", "10.0.0.1", (-1,)), "an owner must be at least 0, got -1"),
        (("eth0", "10.0.0.1", (0,), -5), "bits_per_s must be at least 0, got -5"),
    ],
)
def test_rails_that_cannot_be(fields, error):
    with pytest.raises(ValueError, match=error):
        Rail(*fields)


def test_hosts_that_cannot_be():
    rail = Rail("eth0", "fd00::1", (0,))
    assert check_rails([rail]) == (rail,)
    with pytest.raises(ValueError, match="a host has 1 to 16 rails, got 0"):
        check_rails([])
    with pytest.raises(ValueError, match="rails must have different addresses"):
        check_rails([rail, Rail("eth1", "fd00::1", (1,))])


def test_rails_of_the_environment(monkeypatch):
    monkeypatch.delenv("FUSCO_RAILS", raising=False)
    assert configured_rails() == ()
    monkeypatch.setenv("FUSCO_RAILS", "lo")
    assert [(rail.interface, rail.owners) for rail in configured_rails(2)] == [("lo", (0, 1))]
    monkeypatch.setenv("FUSCO_RAILS", "lo, nowhere0")
    with pytest.raises(ValueError, match="FUSCO_RAILS=lo,nowhere0: interface nowhere0 is missing or down"):
        configured_rails()
