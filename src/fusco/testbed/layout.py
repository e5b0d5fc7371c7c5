"""Hosts, rails and ranks of a testbed, with their names and addresses."""

from __future__ import annotations

import re
from dataclasses import dataclass

# SO_PRIORITY of a socket whose traffic waits for that of a rail's owner: the low class (1:20) of the sender's rail. It
# needs CAP_NET_ADMIN, which processes on a testbed have.
BORROWED_PRIORITY = 0x10020
# IP_TOS (DSCP CS1) of such a socket: the low class of the sender's rail, and of the switch's port to the receiver. It
# needs no privilege.
BORROWED_TOS = 0x20

_MAX_HOSTS, _MAX_RAILS = 250, 250  # each is a byte of an address
_MIN_RATE, _MAX_RATE = 1_000_000, 100_000_000_000
_MIN_MTU, _MAX_MTU = 1280, 65_000
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")


@dataclass(frozen=True)
class Layout:
    """Shape of a testbed.

    Attributes:
        num_hosts: how many hosts.
        num_rails: rails (NICs) of each host; rail r of all hosts is one network.
        rate: of each rail and direction, in bits per second, headers included.
        ranks_per_host: network namespaces of a host. With 1, its processes see all its rails. With more, each has an
            equal share of the rails, and an unlimited link to the others of its host.
        mtu: largest packet, in bytes.

    Raises ``ValueError`` for a shape that is not possible.

    >>> Layout(num_hosts=4, num_rails=4, rate=10**9, ranks_per_host=2).rails_of(1)
    range(2, 4)
    """

    num_hosts: int
    num_rails: int
    rate: int
    ranks_per_host: int = 1
    mtu: int = 9000

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("hosts", self.num_hosts, 1, _MAX_HOSTS),
            ("rails", self.num_rails, 1, _MAX_RAILS),
            ("bit/s of a rail", self.rate, _MIN_RATE, _MAX_RATE),
            ("ranks of a host", self.ranks_per_host, 1, self.num_rails),
            ("bytes of a packet (MTU)", self.mtu, _MIN_MTU, _MAX_MTU),
        ):
            if not least <= value <= most:
                raise ValueError(f"{name}: {value:,} is not in {least:,} to {most:,}")
        if self.num_rails % self.ranks_per_host:
            raise ValueError(f"{self.num_rails} rails of a host do not divide among {self.ranks_per_host} ranks")

    def rails_of(self, local_rank: int) -> range:
        """Return the rails of a host that this rank sees."""
        share = self.num_rails // self.ranks_per_host
        return range(local_rank * share, (local_rank + 1) * share)

    def address(self, host: int, rail: int) -> str:
        """Return the IPv4 address of a host's rail."""
        return f"10.200.{rail}.{host + 1}"


def interface(rail: int) -> str:
    """Return the name of a rail's interface on its host."""
    return f"rail{rail}"


def parse_rate(text: str) -> int:
    """Return bits per second; ``ValueError`` for a text that is not a rate.

    >>> parse_rate("500mbit"), parse_rate("2.5gbit")
    (500000000, 2500000000)
    """
    matched = _RATE.fullmatch(text.strip().lower())
    if not matched:
        raise ValueError(f"{text!r} is not a rate: write a number and kbit, mbit or gbit, such as 500mbit")
    return int(float(matched[1]) * _UNITS[matched[2]])
