"""Attacks on endpoints of ``fusco.rails``: peers that know the secret and break the protocol, and impossible addresses.

A channel to a friend must go on with the right bytes, whatever others do, and memory must not grow.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random

from rails_ends import LIMITS, RAILS
from wire_by_hand import ACK, BYE, DATA, GRANT, RAIL_DOWN, TOO_LARGE, Record, connected_by_hand, pack

from fusco.core.errors import FuscoError, PeerFailureError
from fusco.rails import Address, Endpoint
from fusco.rails.channel import Channel

_NUM_PEERS, _NUM_ADDRESSES = 24, 40
_CHUNK, _FLOOD = 65536, 20_000  # bytes of a peer's chunk; records
_GROWTH_MIB = 64.0  # 24 peers with 4 receives each; without bounds a flood of grants takes more
_KINDS = (DATA, GRANT, ACK, TOO_LARGE, RAIL_DOWN, BYE)


def _number(random: Random) -> int:
    return random.choice((0, 1, 5, 300, 1 << 20, (1 << 32) - 1, 1 << 62, (1 << 64) - 1))


def _any_record(random: Random) -> bytes:
    slot, mask, epoch = (_number(random) & 0xFFFFFFFF for _ in range(3))
    return pack(Record(_number(random), _number(random), slot, mask, epoch, random.choice(_KINDS)))


# What a peer sends after its handshake, while it is granted up to 4 receives and sent up to 4 messages.
_VIOLATIONS: dict[str, Callable[[Random], bytes]] = {
    "a hole": lambda _: (
        pack(Record(0, 200_000, 0, _CHUNK, kind=DATA)) + bytes(_CHUNK) + pack(Record(0, 200_000, 1, kind=TOO_LARGE))
    ),
    "not too large": lambda random: pack(Record(random.randrange(4), random.randrange(200_001), kind=TOO_LARGE)),
    "huge grants": lambda random: b"".join(pack(Record(i, _number(random), kind=GRANT)) for i in range(256)),
    "grants far ahead": lambda random: pack(Record(256 + random.randrange(1 << 63), 10, kind=GRANT)),
    "acknowledged twice": lambda _: pack(Record(0, 10, kind=GRANT)) + 2 * pack(Record(0, kind=ACK)),
    "flood of grants": lambda random: b"".join(pack(Record(i, 10, kind=GRANT)) for i in range(_FLOOD)),
    "flood of empty chunks": lambda _: _FLOOD * pack(Record(0, 0, kind=DATA)),
    "flood of failed rails": lambda _: b"".join(
        pack(Record(slot=i % 40, epoch=1, kind=RAIL_DOWN)) for i in range(_FLOOD)
    ),
    "any records": lambda random: b"".join(_any_record(random) for _ in range(100)),
    "any bytes": lambda random: random.randbytes(random.randrange(5000)),
    "half a chunk": lambda _: pack(Record(0, _CHUNK, 0, _CHUNK, kind=DATA)) + bytes(_CHUNK // 2),
    "nothing": lambda _: b"",
}


def hostile_peers(random: Random) -> str:
    """Peers that know the secret and then break the protocol cost their own channel only."""
    done, before = dict.fromkeys(_VIOLATIONS, 0), 0.0
    with _friends(random) as (endpoint, check):
        for i in range(_NUM_PEERS):
            violation = random.choice(list(_VIOLATIONS))
            done[violation] += 1
            _be_hostile(endpoint, random, violation, check)
            before = before or (_resident_mib() if i >= _NUM_PEERS // 3 else 0.0)
        grown = _resident_mib() - before
    assert grown < _GROWTH_MIB, f"grew by {grown:.1f} MiB after {done}"
    return f"{_NUM_PEERS} peers, grew by {grown:.1f} MiB: {', '.join(kind for kind, num in done.items() if num)}"


def addresses(random: Random) -> str:
    """An address that cannot be, or where no endpoint is, raises a sentence and disturbs no other channel."""
    errors = set[str]()
    with _friends(random) as (endpoint, check):
        for _ in range(_NUM_ADDRESSES):
            what = _random_fields(random)
            error = _error_of(lambda: endpoint.connect(Address(*what), timeout_s=0.05), what)  # noqa: B023
            names_rail = "rail 0 (lo, 127.0.0.1 to " in str(error)
            assert str(error) if not isinstance(error, PeerFailureError) else names_rail, f"{what}: {error!r}"
            errors.add(type(error).__name__)
            check()
    return f"{_NUM_ADDRESSES} addresses raised {', '.join(sorted(errors))}"


def _error_of(connect: Callable[[], object], what: object) -> Exception:
    try:
        connect()
    except (ValueError, TypeError, PeerFailureError) as error:
        return error
    raise AssertionError(f"connected to {what}")


@contextmanager
def _friends(random: Random) -> Iterator[tuple[Endpoint, Callable[[], None]]]:
    """An endpoint that is attacked, and a check that its channel to a friend works."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ending:
        boards = [Path(folder) / name for name in "ab"]
        endpoint, friend = (
            ending.enter_context(Endpoint(worker=i, rails=RAILS, board=board, limits=LIMITS, timeout_s=20.0))
            for i, board in enumerate(boards)
        )
        there = friend.connect(endpoint.listen())
        here = endpoint.accept()

        def check() -> None:
            for sender, receiver in ((here, there), (there, here)):
                sent, buffer = random.randbytes(random.choice((0, 1, 5000, 300_000))), bytearray(300_000)
                received = receiver.irecv(buffer)
                sender.isend(sent).wait()
                assert buffer[: received.wait()] == sent

        yield endpoint, check


def _be_hostile(endpoint: Endpoint, random: Random, violation: str, check: Callable[[], None]) -> None:
    name, rails = random.randbytes(16), random.sample(range(3), random.randint(1, 3))
    room = random.choice((0, 4096))
    peers = [connected_by_hand(endpoint.listen(), name, rail, num_received_bytes=room) for rail in rails]
    channel = endpoint.accept()
    requests = [channel.irecv(bytearray(200_000)) for _ in range(random.randrange(5))]
    requests += [channel.isend(bytes(random.choice((0, 7, 200_000)))) for _ in range(random.randrange(5))]
    for peer in peers:
        peer.settimeout(0.5)
        with suppress(OSError):  # it was thrown out, or nothing is read any more
            peer.sendall(_VIOLATIONS[violation](random))
    check()
    if random.random() < 0.5:
        _close(channel)
    for peer in peers:
        peer.close()
    _close(channel)
    for request in requests:
        with suppress(FuscoError, ValueError):
            request.wait(5.0)
        assert request.done, f"{violation}: {request.verb} #{request.seq} is not done"


def _close(channel: Channel) -> None:
    channel.close()
    assert channel.is_closed


def _random_fields(random: Random) -> tuple[int, int, tuple[tuple[str, int], ...], bytes]:
    """Fields of an address of no endpoint: a port where nothing listens, or a value that cannot be."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    worker, chunk_bytes, host, secret = random.randrange(9), _CHUNK, "127.0.0.1", random.randbytes(32)
    num_rails = random.choice((1, 2, 3, 5, 16))
    bad = random.choice(("nothing", "host", "port", "secret", "chunk_bytes", "worker", "rails"))
    if bad == "host":
        host = random.choice(("", "\0", "localhost", "a" * 600, "256.1.1.1", "::g", "127.0.0.1\0", "é"))
    elif bad == "port":
        port = random.choice((-1, 0, 65536, 70000, 1 << 40))
    elif bad == "secret":
        secret = random.randbytes(random.choice((0, 1, 31, 33)))
    elif bad == "chunk_bytes":
        chunk_bytes = random.choice((0, -5, 1 << 31, 1 << 70))
    elif bad == "worker":
        worker = random.choice((-1, 65536, 1 << 70))
    elif bad == "rails":
        num_rails = random.choice((0, 17, 1000))
    return worker, chunk_bytes, num_rails * ((host, port),), secret


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
