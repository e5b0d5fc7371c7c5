"""A sentinel answers those who know its secret, takes in the first verdict, and tells a silent rank from a dead one."""

import errno
import json
import socket
import time
from contextlib import closing

import pytest

from fusco.control.status_server import Sentinel, SentinelAddress, Silence, Status, Verdict

HOST = "127.0.0.1"
LIMIT_S = 5.0  # what any answer may take on a loaded machine
VERDICT = Verdict(peers=(2, 3), reason="rank 2 is dead", found_by=1, has_left=True)


@pytest.fixture
def sentinel():
    with closing(Sentinel("secret", HOST)) as sentinel:
        yield sentinel


@pytest.fixture
def peer():
    with closing(Sentinel("secret", HOST)) as peer:
        yield peer


@pytest.fixture
def deaf():
    """Somewhere that takes connections, as the kernel does for a stopped process, but never answers."""
    with socket.create_server((HOST, 0)) as server:
        yield SentinelAddress(HOST, server.getsockname()[1])


def say(address, line):
    """What a sentinel answers to some bytes."""
    with socket.create_connection((address.host, address.port), timeout=LIMIT_S) as connection:
        try:
            connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
            return connection.makefile("rb").read()
        except ConnectionError:
            return b""  # it hung up on what was too long
        except OSError as error:
            if error.errno == errno.ENOTCONN:
                return b""
            raise


def test_answers_what_its_rank_does_and_since_when(sentinel, peer):
    peer.note(7, "combine #7", "adding partial sums")
    time.sleep(0.05)
    status = sentinel.ask({3: peer.address}, LIMIT_S)[3]
    assert isinstance(status, Status)
    assert (status.collective, status.operation, status.phase) == (7, "combine #7", "adding partial sums")
    assert 0.05 <= status.seconds < LIMIT_S


def test_asks_nobody_if_there_is_nobody(sentinel):
    assert sentinel.ask({}, LIMIT_S) == {}


def test_tells_a_verdict_and_the_first_one_stays(sentinel, peer):
    sentinel.tell({3: peer.address}, VERDICT, LIMIT_S)
    assert peer.verdict == VERDICT
    sentinel.tell({3: peer.address}, Verdict((0,), "another", 2, has_left=False), LIMIT_S)
    assert peer.verdict == VERDICT
    assert sentinel.verdict is None


@pytest.mark.parametrize("secret", ["", "wrong", "secretly", None, 7])
@pytest.mark.parametrize("request_", [{"ask": "status"}, {"tell": {"peers": [1], "reason": "", "found_by": 0}}])
def test_a_wrong_secret_gets_nothing_and_does_nothing(peer, secret, request_):
    assert say(peer.address, json.dumps({**request_, "secret": secret}).encode() + b"\n") == b""
    assert peer.verdict is None


def test_a_sentinel_of_another_communicator_gets_nothing(peer):
    with closing(Sentinel("another secret", HOST)) as stranger:
        assert isinstance(stranger.ask({3: peer.address}, LIMIT_S)[3], Silence)
        stranger.tell({3: peer.address}, VERDICT, LIMIT_S)
    assert peer.verdict is None


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"\xff\xfe\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1]\n",
        b"7\n",
        b'{"secret": "secret", "tell": {}}\n',
        b'{"secret": "secret", "tell": 7}\n',
        b'{"secret": "secr\xc3\xa9t"}\n',
        b"x" * 100_000,
    ],
)
def test_a_strangers_bytes_do_no_harm(sentinel, peer, line):
    assert say(peer.address, line) == b""
    assert peer.verdict is None
    assert isinstance(sentinel.ask({3: peer.address}, LIMIT_S)[3], Status)


def test_a_rank_that_does_not_answer_is_silent_but_has_not_left(sentinel, deaf):
    began = time.monotonic()
    silence = sentinel.ask({3: deaf}, 0.2)[3]
    assert isinstance(silence, Silence)
    assert not silence.has_left
    assert "does not answer within 0.2 s" in silence.reason
    assert time.monotonic() - began < 0.2 + 1


def test_silent_ranks_are_waited_for_at_once_and_keep_nobody_from_answering(sentinel, peer, deaf):
    began = time.monotonic()
    answers = sentinel.ask({**dict.fromkeys(range(20), deaf), 20: peer.address}, 0.5)
    assert time.monotonic() - began < 2 * 0.5 + 1
    assert [rank for rank, answer in answers.items() if isinstance(answer, Status)] == [20]


def test_a_rank_that_closed_its_sentinel_has_left(sentinel):
    with closing(Sentinel("secret", HOST)) as gone:
        pass
    silence = sentinel.ask({3: gone.address}, LIMIT_S)[3]
    assert isinstance(silence, Silence)
    assert silence.has_left
    sentinel.tell({3: gone.address}, VERDICT, LIMIT_S)  # passed over


def test_many_may_ask_at_once(sentinel, peer):
    answers = sentinel.ask(dict.fromkeys(range(100), peer.address), LIMIT_S)
    assert all(isinstance(answer, Status) for answer in answers.values())
