"""Messages between nodes over several NICs as one link: each peer has a channel of ``fusco.rails``.

There is no thread: the endpoint is polled by the rank, like everything else of a collective. Rows are sent from and
received into the memory where they are.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence

from fusco.control.bootstrap import host_identity
from fusco.control.connect import raise_if_any
from fusco.control.member_gather import Gather
from fusco.control.transport import Message, Ticket, memory_of
from fusco.core.errors import FuscoError, PeerFailureError, Stall, TransportError
from fusco.rails.binding import NAME_BYTES
from fusco.rails.channel import Channel
from fusco.rails.endpoint import Endpoint
from fusco.rails.rail import Address, Rail

_SPREAD_S = 0.25  # a rail that has not connected this long after the first one is used when it does


class RailTransport:
    """A ``Transport`` over the rails of this rank's host; the ranks of the host that see them are its workers."""

    def __init__(
        self, store_gather: Gather, peers: Sequence[int], find_rails: Callable[[int], Sequence[Rail]], secret: str
    ) -> None:
        """Connect, together with all ranks, to ``peers`` of other nodes.

        ``find_rails`` returns the rails of this host for a number of workers; ``secret`` names the channels. Raises
        ``TransportError`` on all ranks if one cannot listen on its rails, and as ``StoreGather.wait_until``.
        """
        self._failure, self._rank, self._channels = "", store_gather.rank, dict[int, Channel]()
        self._numbers = store_gather.members
        self._num_done, self._last_seen, error, address = 0, (0, 0), "", ""
        self._endpoint: Endpoint | None = None
        # Ranks of a host share its NICs, whatever nodes they are in; those in namespaces of their own have their own.
        network = [host_identity(), os.stat("/proc/self/ns/net").st_ino]
        networks = store_gather.all_gather("networks", network)
        together = [rank for rank, other in enumerate(networks) if other == network]
        try:
            try:
                worker, rails = together.index(self._rank), find_rails(len(together))
                self._endpoint = Endpoint(worker=worker, rails=rails, timeout_s=store_gather.timeout_s, is_polled=True)
                address = self._endpoint.listen().to_bytes().decode()
            except (FuscoError, ValueError) as problem:
                error = str(problem)
            found = store_gather.all_gather("rails", {"error": error, "address": address})
            raise_if_any(store_gather, [entry["error"] for entry in found], TransportError)
            addresses = {peer: Address.from_bytes(found[peer]["address"].encode()) for peer in peers}
            self._connect(addresses, secret, store_gather)
        except BaseException:
            self.close()
            raise

    @property
    def failure(self) -> str:
        for peer, channel in self._channels.items():
            if isinstance(channel.error, PeerFailureError) and not channel.error.has_left:
                self._note_failure(f"the network failed (rank {self._numbers[peer]})", channel.error)
        return self._failure

    def send(self, message: Message, dst: int) -> Ticket:
        ticket = Ticket()
        self._channels[dst].isend(memory_of(message), self._finisher(ticket, "send", dst))
        return ticket

    def receive(self, message: Message, src: int, on_done: Callable[[], None] | None = None) -> Ticket:
        ticket = Ticket()
        self._channels[src].irecv(memory_of(message), self._finisher(ticket, "receive", src, on_done))
        return ticket

    def poll(self) -> bool:
        if self._endpoint is None:
            return False
        self._endpoint.poll()
        seen = (self._num_done, self._endpoint.num_bytes)
        has_moved, self._last_seen = seen != self._last_seen, seen
        return has_moved

    def awaited_sockets(self) -> None:
        """Unknown: chunks of a message may take any rail."""

    @property
    def unflushed_peers(self) -> tuple[int, ...]:
        return tuple(peer for peer, channel in self._channels.items() if channel.owes_credits)

    def close(self) -> None:
        self._channels = {}
        if self._endpoint:
            self._endpoint.close()
            self._endpoint = None

    def _connect(self, addresses: Mapping[int, Address], secret: str, store_gather: Gather) -> None:
        """Dial the lower ranks, and wait for the higher ones: until all rails are connected, or enough of them."""
        endpoint, names, since, refused = self._endpoint, {}, 0.0, list[int]()
        assert endpoint
        for peer, address in addresses.items():
            names[peer] = _channel_name(secret, self._rank, peer)
            if peer < self._rank:
                endpoint.dial(address, names[peer])

        def are_connected() -> bool:
            nonlocal since
            endpoint.poll()
            found = {peer: endpoint.channel(name) for peer, name in names.items()}
            for peer, channel in found.items():
                if channel and channel.is_closed:  # no rail can be connected, however often it is tried
                    cause = self._cause(peer, names[peer])
                    refused.append(peer)
                    store_gather.fail(Stall("connecting rails", (peer,), "a rail to it", "none"), cause)
            self._channels = {peer: channel for peer, channel in found.items() if channel and channel.rails}
            if len(self._channels) < len(names):
                return False
            since = since or time.monotonic()
            is_complete = all(channel.is_complete for channel in self._channels.values())
            return is_complete or time.monotonic() > since + _SPREAD_S

        def stall() -> Stall:
            missing = tuple(peer for peer in names if peer not in self._channels)
            return Stall("connecting rails", missing, "a rail to each", f"{len(self._channels)} of {len(names)}")

        try:
            store_gather.wait_until(are_connected, stall)
        except PeerFailureError as error:
            if refused:
                raise
            causes = [
                error.reason,
                *(self._cause(peer, name) for peer, name in names.items() if self._numbers[peer] in error.peers),
            ]
            raise PeerFailureError(
                rank=error.rank,
                peers=error.peers,
                operation=error.operation,
                stall=error.stall,
                reason="; ".join(causes),
                has_left=error.has_left,
            ) from error

    def _cause(self, peer: int, name: bytes) -> str:
        """Return why no rail to a peer is connected; of one that was dialled, for each rail."""
        assert self._endpoint
        channel = self._endpoint.channel(name)
        if channel is None:
            return f"rank {self._numbers[peer]} connected no rail to this one"
        channel.give_up("")
        self._endpoint.wait_until(lambda: channel.is_closed, _SPREAD_S)
        reason = channel.error.reason if isinstance(channel.error, PeerFailureError) else channel.error
        return f"rank {self._numbers[peer]}: {reason}"

    def _finisher(
        self, ticket: Ticket, direction: str, peer: int, on_done: Callable[[], None] | None = None
    ) -> Callable[[BaseException | None], None]:
        def finish(error: BaseException | None) -> None:
            if error is None:
                ticket.is_done = True
                self._num_done += 1
                if on_done:
                    on_done()
            else:
                self._note_failure(f"the network failed to {direction} (rank {self._numbers[peer]})", error)

        return finish

    def _note_failure(self, what: str, error: BaseException) -> None:
        reason = error.reason if isinstance(error, PeerFailureError) else str(error)
        self._failure = self._failure or f"{what}: {reason}"


def _channel_name(secret: str, rank: int, peer: int) -> bytes:
    """Return the name of the channel of two ranks, the same at both."""
    text = f"{secret} {min(rank, peer)} {max(rank, peer)}"
    return hashlib.blake2b(text.encode(), digest_size=NAME_BYTES).digest()
