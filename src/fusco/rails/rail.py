"""The NICs of this host, from configuration or discovered, and addresses at which others reach them."""

from __future__ import annotations

import fcntl
import ipaddress
import json
import math
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from fusco.core.environment import ALL_RAILS, RAILS_VARIABLE, rail_names
from fusco.core.integers import MAX_INT32, check_integer
from fusco.core.topology import RankLinks, Topology

MAX_RAILS = 16  # rails of a host; the board has room for as many
_MAX_INTERFACE_BYTES = 15  # IFNAMSIZ without the terminator
_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_GLOBAL_SCOPE = "00"  # of an address in /proc/net/if_inet6
_REQUEST = struct.Struct("16s24s")  # struct ifreq
_SECRET_BYTES, _MAX_PORT, _MAX_WORKER = 32, 65535, 65535


@dataclass(frozen=True)
class Rail:
    """A NIC of this host. Rail i of a host is connected to rail i of every other host.

    Attributes:
        interface: its name, for example ``"eth0"``. Connections are bound to it.
        address: its IPv4 or IPv6 address, by which other hosts reach it.
        owners: the workers of this host whose direct NIC it is; workers that share it are not isolated from each other.
        bits_per_s: its speed; 0 if unknown.

    Raises:
        TypeError, ValueError: for an interface name, address, worker or speed that cannot be one.
    """

    interface: str
    address: str
    owners: tuple[int, ...]
    bits_per_s: int = 0

    def __post_init__(self) -> None:
        if not 1 <= len(self.interface.encode()) <= _MAX_INTERFACE_BYTES:
            raise ValueError(f"interface must have 1 to {_MAX_INTERFACE_BYTES} bytes, got {self.interface!r}")
        ipaddress.ip_address(self.address)
        for owner in self.owners:
            check_integer("an owner", owner, least=0)
        check_integer("bits_per_s", self.bits_per_s, least=0)


def check_rails(rails: Sequence[Rail]) -> tuple[Rail, ...]:
    """Return the rails of a host; ``ValueError`` if there are none, too many, or two of one address."""
    if not 1 <= len(rails) <= MAX_RAILS:
        raise ValueError(f"a host has 1 to {MAX_RAILS} rails, got {len(rails)}")
    if len({rail.address for rail in rails}) < len(rails):
        raise ValueError(f"rails must have different addresses, got {', '.join(rail.address for rail in rails)}")
    return tuple(rails)


def discover_rails(interfaces: Sequence[str] | None = None, num_workers: int | None = None) -> tuple[Rail, ...]:
    """Return the rails of this host and network namespace: interfaces that are up, with an address, by name.

    Args:
        interfaces: their names, in the order of rails; by default all but the loopback device. Pass them where other
            interfaces exist, such as those of containers or of a management network.
        num_workers: workers of this host; by default as many as rails. Worker w owns rail w modulo the number of rails;
            of more rails than workers, worker w owns rails w, w + num_workers, and so on.

    Raises:
        ValueError: if there is none, or one of ``interfaces`` is missing, down, or has no address.
    """
    names = sorted(name for _, name in socket.if_nameindex()) if interfaces is None else list(interfaces)
    found: list[tuple[str, str]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for name in names:
            flags = _flags(query, name)
            address = _address(query, name) if flags & _IFF_UP else ""
            if interfaces is not None and not address:
                raise ValueError(f"interface {name} {'has no address' if flags & _IFF_UP else 'is missing or down'}")
            if address and (interfaces is not None or not flags & _IFF_LOOPBACK):
                found.append((name, address))
    if not found:
        raise ValueError("this host has no interface that is up and has an address, except the loopback device")
    owners = owners_of(len(found), len(found) if num_workers is None else num_workers)
    return check_rails([Rail(*names, of_it, _bits_per_s(names[0])) for names, of_it in zip(found, owners, strict=True)])


def owners_of(num_rails: int, num_workers: int) -> list[tuple[int, ...]]:
    """Return the owners of each rail: workers share rails evenly, or rails are shared among fewer workers.

    >>> owners_of(2, 3), owners_of(3, 2)
    ([(0, 2), (1,)], [(0,), (1,), (0,)])
    """
    return [tuple(range(rail, num_workers, num_rails)) or (rail % num_workers,) for rail in range(num_rails)]


def links_of_ranks(topology: Topology, networks: Sequence[int], num_rails: int) -> RankLinks | None:
    """Return the NICs of each rank, in a unit in which all are integers; ``None`` if all ranks have as many.

    The ranks of a node that are in one network namespace, ``networks[rank]``, share its rails as ``owners_of`` says.

    Three rails for two ranks, and two for three:

    >>> links_of_ranks(Topology.of_equal_nodes(4, 2), [7, 7, 8, 8], num_rails=3)
    ((2, 1), (2, 1))
    >>> links_of_ranks(Topology.of_equal_nodes(3, 3), [7, 7, 7], num_rails=2)
    ((1, 2, 1),)
    >>> links_of_ranks(Topology.of_equal_nodes(4, 2), [7, 7, 8, 9], num_rails=2)
    ((1, 1), (2, 2))
    """
    shares = [Fraction(0)] * topology.world_size
    for ranks in topology.node_to_ranks:
        for network in {networks[rank] for rank in ranks}:
            together = [rank for rank in ranks if networks[rank] == network]
            for owners in owners_of(num_rails, len(together)):
                for worker in owners:
                    shares[together[worker]] += Fraction(1, len(owners))
    if len(set(shares)) == 1:
        return None
    unit = math.lcm(*(share.denominator for share in shares))
    return tuple(tuple(int(shares[rank] * unit) for rank in ranks) for ranks in topology.node_to_ranks)


def configured_rails(num_workers: int | None = None) -> tuple[Rail, ...]:
    """Return the rails that ``FUSCO_RAILS`` names, none if it is not set; otherwise as ``discover_rails``."""
    names = rail_names()
    if not names:
        return ()
    try:
        return discover_rails(None if names == (ALL_RAILS,) else names, num_workers)
    except ValueError as error:
        raise ValueError(f"{RAILS_VARIABLE}={','.join(names)}: {error}") from None


def _flags(query: socket.socket, interface: str) -> int:
    """Return the flags of an interface in the namespace of the socket ``query``; 0 if there is none."""
    try:
        answer = fcntl.ioctl(query.fileno(), _SIOCGIFFLAGS, _REQUEST.pack(interface.encode(), b""))
    except OSError:
        return 0
    return int(struct.unpack_from("H", answer, 16)[0])


def _address(query: socket.socket, interface: str) -> str:
    """Return the IPv4 address of an interface, or its first global IPv6 address; empty if there is none."""
    try:
        answer = fcntl.ioctl(query.fileno(), _SIOCGIFADDR, _REQUEST.pack(interface.encode(), b""))
        return socket.inet_ntoa(answer[20:24])
    except OSError:
        return next((address for address, name in _ipv6_addresses() if name == interface), "")


def _ipv6_addresses() -> list[tuple[str, str]]:
    """Return the global IPv6 addresses of this namespace and their interfaces."""
    table = Path("/proc/net/if_inet6")
    lines = [line.split() for line in table.read_text(encoding="ascii").splitlines()] if table.exists() else []
    return [
        (socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)), name)
        for digits, _, _, scope, _, name in lines
        if scope == _GLOBAL_SCOPE
    ]


def _bits_per_s(interface: str) -> int:
    """Return the speed of an interface; 0 if the kernel does not know it, as for most virtual ones."""
    try:
        mbits = int(Path(f"/sys/class/net/{interface}/speed").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
    return max(0, mbits) * 1_000_000


@dataclass(frozen=True)
class Address:
    """Address at which an endpoint listens. Anyone who has it can connect, so pass it over a trusted channel.

    Attributes:
        worker: the worker, as numbered on its host.
        chunk_bytes: bytes of its chunks.
        rails: for each rail, IP address and port.
        secret: authenticates connections, 32 bytes.

    Raises:
        TypeError, ValueError: for a value that cannot be.
    """

    worker: int
    chunk_bytes: int
    rails: tuple[tuple[str, int], ...]
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        check_integer("worker", self.worker, least=0, most=_MAX_WORKER)
        check_integer("chunk_bytes", self.chunk_bytes, least=1, most=MAX_INT32)
        if not 1 <= len(self.rails) <= MAX_RAILS:
            raise ValueError(f"an address has 1 to {MAX_RAILS} rails, got {len(self.rails)}")
        for host, port in self.rails:
            ipaddress.ip_address(host)
            check_integer("a port", port, least=1, most=_MAX_PORT)
        if len(self.secret) != _SECRET_BYTES:
            raise ValueError(f"a secret has {_SECRET_BYTES} bytes, got {len(self.secret)}")

    def to_bytes(self) -> bytes:
        """Return the address as bytes, for a store or a file."""
        fields = {**vars(self), "secret": self.secret.hex()}
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Address:
        """Return the address of ``to_bytes``; ``ValueError`` for other bytes."""
        try:
            fields = json.loads(data)
            rails = tuple((str(host), int(port)) for host, port in fields["rails"])
            return cls(int(fields["worker"]), int(fields["chunk_bytes"]), rails, bytes.fromhex(fields["secret"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{bytes(data[:80])!r} is not the address of an endpoint: {error!r}") from None
