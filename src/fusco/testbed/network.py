"""Network of a testbed, made with netlink: rails of hosts, and a switch that connects them.

Every host has a veth pair for each rail, whose other end is a port of the switch. The switch has a bridge for each
rail, and routes between bridges: any rail reaches any other, as in a network of leaves and spines. Both ends of a pair
send at the rail's rate at most. So what a host sends and what it receives are limited, and incast queues at the port.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.rtnl.tcmsg import plugins

from fusco.testbed.layout import BORROWED_TOS, Layout, interface
from fusco.testbed.namespaces import NEW_NETWORK, unshare

# Classes of a rail: all, the owner's, borrowed. The low class keeps a hundredth of the rate.
_ROOT, _ALL, _OWNER, _BORROWED = 0x10000, 0x10001, 0x10010, 0x10020
_BORROWED_SHARE = 0.01
# A burst covers the time that a busy core may be late, and is at least two packets of 64 KB. Queues hold some
# milliseconds, as switches do, and not less than a few segments of many connections.
_BURST_S, _MIN_BURST_BYTES = 0.001, 128 << 10
_QUEUE_S, _MIN_QUEUE_BYTES = 0.02, 2 << 20
_IPV4 = 0x0800  # ETH_P_IP
_LOCAL = "local"  # unlimited link between the namespaces of a host
_LOCAL_MTU = 65_535
_LOCAL_TABLE, _RAIL_TABLE = 99, 100  # routing tables: ranks of the host; 100 + r: what leaves by rail r
_SETTINGS = {
    # Loss-based, as the cubic of most hosts, which namespaces may not choose.
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/tcp_slow_start_after_idle": "0",  # a collective after a pause starts at full rate
    "ipv4/conf/all/rp_filter": "0",
    "ipv4/conf/default/rp_filter": "0",
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv6/conf/default/disable_ipv6": "1",
}
plugins["bfifo"] = plugins["pfifo"]  # pyroute2 lacks it; both have one option, the limit, here in bytes


class NetworkNamespace:
    """A new network namespace, held by a descriptor; this process is in it afterwards."""

    def __init__(self) -> None:
        unshare(NEW_NETWORK)
        self.descriptor = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self.inode = os.fstat(self.descriptor).st_ino
        for name, value in _SETTINGS.items():
            with suppress(FileNotFoundError):  # a kernel without IPv6
                Path("/proc/sys/net", name).write_text(value, encoding="ascii")
        self.netlink = IPRoute()
        self.netlink.link("set", index=1, state="up")  # the loopback device

    def index(self, name: str) -> int:
        """Return the index of an interface."""
        return int(self.netlink.link_lookup(ifname=name)[0])

    def close(self) -> None:
        """Release the namespace; the kernel removes it with its last process."""
        self.netlink.close()
        os.close(self.descriptor)


class Switch:
    """Switch with a bridge for each rail, and for each host one that connects its ranks."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self.namespace = layout, NetworkNamespace()
        self.of_ranks: dict[tuple[int, int], NetworkNamespace] = {}  # by host and local rank
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="ascii")
        self._bridges = [self._add_bridge(interface(rail), layout.mtu) for rail in range(layout.num_rails)]
        for rail, index in enumerate(self._bridges):
            self.namespace.netlink.addr("add", index=index, address=_gateway(rail), prefixlen=24)
        self._local_bridges = (
            [self._add_bridge(f"local{host}", _LOCAL_MTU) for host in range(layout.num_hosts)]
            if layout.ranks_per_host > 1
            else []
        )

    def connect(self, host: int, local_rank: int) -> None:
        """Make a rank's namespace, with its rails and its link to the other ranks of the host."""
        layout = self._layout
        namespace = self.of_ranks[host, local_rank] = NetworkNamespace()
        for rail in layout.rails_of(local_rank):
            name, port = interface(rail), _port(host, rail)
            self._add_pair(port, self._bridges[rail], namespace, name, layout.mtu)
            index = namespace.index(name)
            namespace.netlink.addr("add", index=index, address=layout.address(host, rail), prefixlen=24)
            _shape(self.namespace.netlink, self.namespace.index(port), layout.rate, "add")
            _shape(namespace.netlink, index, layout.rate, "add")
        if self._local_bridges:
            self._add_pair(f"h{host}l{local_rank}", self._local_bridges[host], namespace, _LOCAL, _LOCAL_MTU)
        _add_routes(layout, host, local_rank, namespace)

    def set_rate(self, host: int, rail: int, rate: int) -> None:
        """See ``Testbed.set_rate``; ``rate`` is in bits per second."""
        namespace = self._of_rail(host, rail)
        _shape(namespace.netlink, namespace.index(interface(rail)), rate, "change")
        _shape(self.namespace.netlink, self.namespace.index(_port(host, rail)), rate, "change")

    def set_link(self, host: int, rail: int, state: str) -> None:
        """See ``Testbed.set_link``: the rail loses its carrier while the switch's port is ``"down"``, not ``"up"``."""
        self.namespace.netlink.link("set", index=self.namespace.index(_port(host, rail)), state=state)

    def counters(self, host: int, rail: int) -> tuple[int, int]:
        """See ``Testbed.counters``."""
        namespace = self._of_rail(host, rail)
        (link,) = namespace.netlink.get_links(namespace.index(interface(rail)))
        statistics = link.get_attr("IFLA_STATS64")
        return int(statistics["tx_bytes"]), int(statistics["rx_bytes"])

    def _of_rail(self, host: int, rail: int) -> NetworkNamespace:
        return self.of_ranks[host, rail // (self._layout.num_rails // self._layout.ranks_per_host)]

    def _add_bridge(self, name: str, mtu: int) -> int:
        netlink = self.namespace.netlink
        netlink.link("add", kind="bridge", ifname=name, mtu=mtu)
        index = self.namespace.index(name)
        netlink.link("set", index=index, state="up")
        return index

    def _add_pair(self, port: str, bridge: int, namespace: NetworkNamespace, name: str, mtu: int) -> None:
        netlink = self.namespace.netlink
        netlink.link(
            "add",
            kind="veth",
            ifname=port,
            mtu=mtu,
            peer={"ifname": name, "net_ns_fd": namespace.descriptor, "mtu": mtu},
        )
        netlink.link("set", index=self.namespace.index(port), master=bridge, state="up")
        namespace.netlink.link("set", index=namespace.index(name), state="up")


def _port(host: int, rail: int) -> str:
    return f"h{host}r{rail}"


def _gateway(rail: int) -> str:
    return f"10.200.{rail}.254"


def _add_routes(layout: Layout, host: int, local_rank: int, namespace: NetworkNamespace) -> None:
    """Route by source: what has a rail's address leaves by that rail, and only ranks of this host are reached locally.

    Without a source address, traffic leaves by the rail of its destination's network, if this rank has that rail, and
    else by this rank's first one.
    """
    netlink, own = namespace.netlink, layout.rails_of(local_rank)
    first = {"gateway": _gateway(own[0]), "oif": namespace.index(interface(own[0]))}
    source = layout.address(host, own[0])
    netlink.rule("add", table=_LOCAL_TABLE, priority=_LOCAL_TABLE)
    for rail in range(layout.num_rails):
        if rail in own:
            index, address = namespace.index(interface(rail)), layout.address(host, rail)
            netlink.rule("add", table=_RAIL_TABLE + rail, priority=_RAIL_TABLE + rail, src=address, src_len=32)
            netlink.route("add", dst=f"10.200.{rail}.0/24", oif=index, scope=253, table=_RAIL_TABLE + rail)
            netlink.route("add", dst="10.200.0.0/16", gateway=_gateway(rail), oif=index, table=_RAIL_TABLE + rail)
        else:
            netlink.route("add", dst=f"10.200.{rail}.0/24", prefsrc=source, **first)
            netlink.route(
                "add",
                dst=f"{layout.address(host, rail)}/32",
                oif=namespace.index(_LOCAL),
                scope=253,
                prefsrc=source,
                table=_LOCAL_TABLE,
            )


def _shape(netlink: Any, index: int, rate: int, verb: str) -> None:
    """Limit an interface to ``rate`` bits per second in two classes, of which the owner's is first.

    ``"add"`` makes the classes, ``"change"`` only changes their rates.
    """
    rate_bytes = rate / 8
    burst = max(_MIN_BURST_BYTES, int(rate_bytes * _BURST_S))
    if verb == "add":
        netlink.tc("add", "htb", index, _ROOT, default=_OWNER & 0xFFFF)
    for number, parent, share, priority in (
        (_ALL, _ROOT, 1.0, 0),
        (_OWNER, _ALL, 1 - _BORROWED_SHARE, 0),
        (_BORROWED, _ALL, _BORROWED_SHARE, 7),
    ):
        netlink.tc(
            f"{verb}-class",
            "htb",
            index,
            number,
            parent=parent,
            rate=int(rate_bytes * share),
            ceil=int(rate_bytes),
            prio=priority,
            burst=burst,
            cburst=burst,
            quantum=_MIN_BURST_BYTES,
        )
    queue = max(_MIN_QUEUE_BYTES, int(rate_bytes * _QUEUE_S))
    for number in (_OWNER, _BORROWED):
        netlink.tc(verb, "bfifo", index, (number & 0xFFFF) << 16, parent=number, limit=queue)
    if verb == "add":
        # The second byte of the IPv4 header, without its two bits of congestion notification.
        netlink.tc(
            "add-filter",
            "u32",
            index,
            parent=_ROOT,
            prio=1,
            protocol=_IPV4,
            target=_BORROWED,
            keys=[f"{BORROWED_TOS << 16:#010x}/0x00fc0000+0"],
        )
