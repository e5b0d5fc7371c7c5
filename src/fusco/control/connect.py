"""Connect a rank to all others: status servers, shared memory of the node, TCP between nodes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from fusco.control.agreement import Member
from fusco.control.bootstrap import PeerInfo
from fusco.control.fault_finder import Peer
from fusco.control.layout import SegmentSizes
from fusco.control.member_board import View
from fusco.control.member_gather import Gather, MemberGather
from fusco.control.node_memory import NodeMemory, warm_up_node_memory
from fusco.control.record_round import warm_up_record_round
from fusco.control.shared_segment import SegmentAddress, SharedSegment, check_room
from fusco.control.status_server import StatusServer
from fusco.control.store_gather import StoreGather
from fusco.control.tcp_transport import TcpTransport
from fusco.control.transport import Mesh
from fusco.control.watchdog import Watchdog
from fusco.core.errors import FuscoError, SharedMemoryError, Stall, TransportError, first_line, name_ranks, reason_of

_Connected = TypeVar("_Connected")

# Module state: each rank reports which of its process's communicators it is in, so that an error can say that ranks
# call the verbs of two communicators in different orders.
_STATUS_SERVERS: set[StatusServer] = set()


@dataclass(frozen=True)
class Connections:
    """Memory and connections of one rank's communicator; ``close`` frees them all without waiting for other ranks.

    ``store_gather`` made them, and now watches for ranks that die. ``transport`` has a connection to each counterpart,
    and ``mesh`` carries records, over these or another transport. ``listen_on`` is the address that other ranks reach;
    ``secret`` authenticates ranks. ``members`` are all of them, by their number in the group.
    """

    store_gather: Gather
    status_server: StatusServer
    members: Mapping[int, Member]
    watchdog: Watchdog
    transport: TcpTransport
    mesh: Mesh
    memory: NodeMemory
    listen_on: str
    secret: str = field(repr=False)
    _resources: ExitStack

    def close(self) -> None:
        """Free everything; the status server, too, unless it is held."""
        self._resources.close()
        self.status_server.close()


def connect(
    store_gather: Gather,
    sizes: SegmentSizes,
    peer_info: PeerInfo,
    spin_s: float = 0.0,
    compile_kernels: Callable[[], object] = lambda: None,
) -> Connections:
    """Connect to all other ranks and map the segments of the ranks of this node, whose sizes are equal on all ranks.

    ``spin_s`` is that of the ``Watchdog``; ``compile_kernels`` is called once all ranks have room.

    Raises:
        SharedMemoryError: on all ranks, if one has no room or cannot open a peer's segment.
        PeerFailureError: with the rank that died or did not join in time.
        TransportError: if a network does not work.
    """
    num_neighbours = sum(host == peer_info.hosts[store_gather.rank] for host in peer_info.hosts)
    _require_room(store_gather, sizes, num_neighbours)
    warm_up_node_memory()  # before any rank's clock runs
    warm_up_record_round()
    compile_kernels()
    with ExitStack() as resources:
        secret = _secret(store_gather)
        hosts, listen_on, topology = peer_info.hosts, peer_info.listen_on, sizes.control.topology
        status_server, members = _members(store_gather, secret, listen_on, hosts)
        resources.callback(status_server.close)
        peers = _peers(store_gather, members)
        watchdog = Watchdog(store_gather.rank, peers, status_server, store_gather.timeout_s, spin_s, topology.members)
        resources.callback(watchdog.close)
        watchdog.begin(0, "Communicator")
        store_gather.watched_by(watchdog)
        segments = _map_segments(store_gather, sizes, num_neighbours)
        for segment in segments:
            resources.enter_context(segment)
        memory = NodeMemory(sizes.control, store_gather.rank, segments)
        resources.callback(memory.close)
        counterparts = [memory.counterpart(node) for node in topology.remote_nodes(store_gather.rank)]
        transport = connecting(
            lambda: TcpTransport(store_gather, counterparts, listen_on, secret, "TCP mesh"),
            "over TCP",
            tuple(peers),
            watchdog,
        )
        resources.callback(transport.close)
        resources.callback(watchdog.close)  # before the connections that it watches, in whatever thread
        watchdog.watch_network(transport, transport.descriptors, polls=False)
        watchdog.end()
        mesh, closing = Mesh(transport), resources.pop_all()
        return Connections(
            store_gather, status_server, members, watchdog, transport, mesh, memory, listen_on, secret, closing
        )


def connecting(connect: Callable[[], _Connected], how: str, others: tuple[int, ...], watchdog: Watchdog) -> _Connected:
    """Connect; a network error becomes ``PeerFailureError`` with the rank at fault, or ``TransportError`` if all live.

    ``how`` names the network in the error. The watchdog then asks all ranks for their status; ``others`` are those that
    this one connects to.
    """
    try:
        return connect()
    except FuscoError:
        raise
    except (OSError, RuntimeError) as error:
        symptom = f"the ranks could not be connected {how}: {first_line(error)}"
        watchdog.query_all_ranks(Stall("connecting", others, "a connection to each", "too few"), symptom)
        raise TransportError(symptom) from error


def _secret(store_gather: Gather) -> str:
    """Return a secret that only ranks know. Members derive it, as their values travel unencrypted."""
    if isinstance(store_gather, MemberGather):
        return store_gather.secret
    return str(store_gather.all_gather("secret", secrets.token_hex(16))[0])


def _members(
    store_gather: Gather, secret: str, listen_on: str, hosts: Sequence[str]
) -> tuple[StatusServer, Mapping[int, Member]]:
    """Return this rank's status server and all members: those of a ``MemberGather``, or new ones."""
    if isinstance(store_gather, MemberGather):
        return store_gather.status_server, store_gather.by_number
    return _start_status_server(store_gather, secret, listen_on, hosts)


def _peers(store_gather: Gather, members: Mapping[int, Member]) -> dict[int, Peer]:
    """Return all other members by rank."""
    host = members[store_gather.members[store_gather.rank]].host
    found = {rank: members[number] for rank, number in enumerate(store_gather.members)}
    return {
        rank: Peer(member.address, member.pid, member.host == host)
        for rank, member in found.items()
        if rank != store_gather.rank
    }


def _start_status_server(
    store_gather: StoreGather, secret: str, listen_on: str, hosts: Sequence[str]
) -> tuple[StatusServer, Mapping[int, Member]]:
    """Start this rank's status server and exchange addresses; if one rank cannot listen, all raise."""
    with ExitStack() as undo:
        status_server, error = None, ""
        try:
            status_server = StatusServer(secret, listen_on, _STATUS_SERVERS)
            undo.callback(status_server.close)
        except OSError as failure:
            error = f"cannot listen on {listen_on}: {reason_of(failure)}"
        except RuntimeError as failure:  # no thread could be started
            error = f"cannot listen on {listen_on}: {failure}"
        address = status_server.address if status_server else None
        found = store_gather.all_gather("status server", {"error": error, "address": address, "pid": os.getpid()})
        raise_if_any(store_gather, [entry["error"] for entry in found], TransportError)
        assert status_server is not None
        status_server.install(View(0, store_gather.members), store_gather.rank)
        undo.pop_all()
    return status_server, {
        rank: Member(tuple(entry["address"]), entry["pid"], hosts[rank]) for rank, entry in enumerate(found)
    }


def _require_room(store_gather: Gather, sizes: SegmentSizes, num_neighbours: int) -> None:
    """Raise ``SharedMemoryError`` on all ranks if one has no room for its segment."""
    error = ""
    try:
        check_room(sizes.num_bytes, num_neighbours, sizes.private_bytes)
    except SharedMemoryError as failure:
        error = str(failure)
    raise_if_any(store_gather, store_gather.all_gather("room", error))


def _map_segments(store_gather: Gather, sizes: SegmentSizes, num_neighbours: int) -> list[SharedSegment]:
    """Make this rank's segment and map those of its node, by local rank; if one rank cannot, all raise."""
    with ExitStack() as undo:
        local, error, topology = None, "", sizes.control.topology
        try:
            local = undo.enter_context(SharedSegment.create(sizes.num_bytes, num_neighbours, sizes.private_bytes))
        except SharedMemoryError as failure:
            error = str(failure)
        addresses = store_gather.all_gather(
            "segment", {"error": error, "address": asdict(local.address) if local else None}
        )
        raise_if_any(store_gather, [entry["error"] for entry in addresses])
        assert local is not None

        segments = []
        try:
            for rank in topology.node_to_ranks[topology.rank_to_node[store_gather.rank]]:
                address = SegmentAddress(**addresses[rank]["address"])
                segments.append(
                    local if rank == store_gather.rank else undo.enter_context(SharedSegment.open_peer(address))
                )
        except SharedMemoryError as failure:
            error = str(failure)
        raise_if_any(store_gather, store_gather.all_gather("mapped", error))
        undo.pop_all()
    return segments


def raise_if_any(store_gather: Gather, errors: Sequence[str], kind: type[FuscoError] = SharedMemoryError) -> None:
    """Raise ``kind`` if any rank has an error; ``errors`` are those of all ranks, by rank, ``""`` for none."""
    error_to_ranks: dict[str, list[int]] = {}
    for rank, error in zip(store_gather.members, errors, strict=True):
        error_to_ranks.setdefault(error, []).append(rank)
    if failed := [f"{name_ranks(ranks)}: {error}" for error, ranks in error_to_ranks.items() if error]:
        raise kind("; ".join(failed))
