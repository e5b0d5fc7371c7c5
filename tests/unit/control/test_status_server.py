"""A status server answers with its secret only, keeps the first failure report, separates silent from dead ranks."""

import errno
import itertools
import json
import resource
import socket
import struct
import threading
import time
from contextlib import ExitStack, closing, contextmanager
from functools import partial

import pytest

from fusco.control.hello import CHALLENGE_BYTES, NONCE_BYTES, TAG_BYTES, ServerHello, tag_of
from fusco.control.rank_requests import ask_all
from fusco.control.status_server import FailureReport, NoAnswer, Status, StatusServer, Unasked

HOST = "127.0.0.1"
LIMIT_S = 5.0  # for any answer on a loaded machine
REPORT = FailureReport(peers=(2, 3), reason="rank 2 is dead", found_by=1, has_left=True)


@pytest.fixture
def status_server():
    with closing(StatusServer("secret", HOST)) as status_server:
        yield status_server


@pytest.fixture
def peer():
    with closing(StatusServer("secret", HOST)) as peer:
        yield peer


def test_a_rank_outside_a_communicator_says_in_which_call_of_another_one_it_is():
    siblings: set[StatusServer] = set()
    with (
        closing(StatusServer("secret", HOST, siblings)) as one,
        closing(StatusServer("other", HOST, siblings)) as other,
    ):
        one.note(1, "Communicator", "")
        assert one.status.elsewhere == ""
        other.note(3, "dispatch #3", "records of node 0")
        assert (one.status.operation, one.status.elsewhere) == ("Communicator", "dispatch #3")
        one.note(2, "combine #2", "start")
        assert one.status.elsewhere == ""
        one.note(2, "combine #2", "")
        other.note(3, "dispatch #3", "")
        assert one.status.elsewhere == ""
        other.note(4, "dispatch #4", "records of node 0")
        other.leave_siblings()  # as it has failed in it
        assert one.status.elsewhere == ""
    assert not siblings


def test_a_value_counts_once_its_sender_has_the_answer(status_server, monkeypatch):
    """Else this rank might go on, with the interpreter's lock held, while the sender waits for the answer."""
    values, seen, answer = status_server.board.values(1, "stage"), [], ServerHello.answer
    monkeypatch.setattr(ServerHello, "answer", lambda hello, body: (seen.append(dict(values)), answer(hello, body)))
    message = json.dumps({"value": {"number": 1, "stage": "stage", "sender": 2, "value": "of 2"}})
    assert ask_all([status_server.address], b"secret", message.encode(), LIMIT_S) == [b"{}"]
    deadline = time.monotonic() + LIMIT_S
    while not values and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (seen, values) == ([{}], {2: "of 2"})


@pytest.fixture
def deaf():
    """A server that accepts connections, as the kernel does for a stopped process, but never answers."""
    with socket.create_server((HOST, 0)) as server:
        yield (HOST, server.getsockname()[1])


def signed(challenge, secret, request, role=b"client"):
    """The client's message of a hello."""
    nonce = bytes(NONCE_BYTES)
    tag = tag_of(secret, role, challenge[-NONCE_BYTES:] + nonce, request)
    return nonce + struct.pack("!I", len(request)) + request + tag


def send(address, message):
    """Send bytes to a status server, or what ``message`` makes of its challenge, and return its answer."""
    with socket.create_connection(address, timeout=LIMIT_S) as connection:
        try:
            connection.sendall(message(b"") if callable(message) else message)  # there is no challenge
            connection.shutdown(socket.SHUT_WR)
            return connection.makefile("rb").read()
        except ConnectionError:
            return b""  # the server closed the connection, as the message was too long
        except OSError as error:
            if error.errno == errno.ENOTCONN:
                return b""
            raise


def test_reports_the_phase_of_its_rank_and_its_duration(status_server, peer):
    peer.note(7, "combine #7", "adding partial sums")
    time.sleep(0.05)
    status = status_server.ask({3: peer.address}, LIMIT_S)[3]
    assert isinstance(status, Status)
    assert (status.collective, status.operation, status.phase) == (7, "combine #7", "adding partial sums")
    assert 0.05 <= status.seconds < LIMIT_S


def test_asks_no_rank_if_there_is_none(status_server):
    assert status_server.ask({}, LIMIT_S) == {}


def test_sends_a_failure_report_and_the_first_one_stays(status_server, peer):
    status_server.report_failure({3: peer.address}, REPORT, LIMIT_S)
    assert peer.failure_report == REPORT
    status_server.report_failure({3: peer.address}, FailureReport((0,), "another", 2, has_left=False), LIMIT_S)
    assert peer.failure_report == REPORT
    assert status_server.failure_report is None


REQUEST = {"failure": {"peers": [1], "reason": "", "found_by": 0, "has_left": True}}


def test_the_secret_gets_an_answer(peer):
    answer = send(peer.address, lambda challenge: signed(challenge, b"secret", json.dumps(REQUEST).encode()))
    assert answer[4:-TAG_BYTES] == b"{}"
    assert peer.failure_report == FailureReport((1,), "", 0, has_left=True)


def test_a_message_of_the_server_is_no_request(peer):
    request = json.dumps(REQUEST).encode()
    assert send(peer.address, lambda challenge: signed(challenge, b"secret", request, role=b"server")) == b""
    assert peer.failure_report is None


def test_the_secret_does_not_travel_and_an_impostor_is_not_believed(status_server):
    received = []

    def play():
        connection, _ = impostor.accept()
        with connection:
            connection.settimeout(LIMIT_S)
            received.append(connection.recv(1000))
            status = b'{"collective": 9, "operation": "combine #9", "phase": "start", "seconds": 0.0}'
            connection.sendall(struct.pack("!I", len(status)) + status + bytes(TAG_BYTES))

    with socket.create_server((HOST, 0)) as impostor:
        thread = threading.Thread(target=play)
        thread.start()
        answer = status_server.ask({3: impostor.getsockname()[:2]}, LIMIT_S)[3]
        thread.join()
    assert isinstance(answer, NoAnswer)
    assert "does not know the secret" in answer.reason
    assert b"secret" not in received[0]


@pytest.mark.parametrize("secret", [b"", b"wrong", b"secretly", b"secre", b"\xff", b"SECRET"])
@pytest.mark.parametrize("request_", [{"ask": "status"}, REQUEST, {"departure": {"rank": 1, "reason": "left"}}])
def test_a_wrong_secret_gets_nothing_and_does_nothing(peer, secret, request_):
    request = json.dumps(request_).encode()
    assert send(peer.address, lambda challenge: signed(challenge, secret, request)) == b""
    assert peer.failure_report is None
    assert not peer.departures


def test_a_status_server_of_another_communicator_gets_nothing(peer):
    with closing(StatusServer("another secret", HOST)) as foreign:
        assert isinstance(foreign.ask({3: peer.address}, LIMIT_S)[3], NoAnswer)
        foreign.report_failure({3: peer.address}, REPORT, LIMIT_S)
    assert peer.failure_report is None


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\n",
        b"\xff\xfe\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1]\n",
        b"7\n",
        b"x" * 100_000,
        bytes(NONCE_BYTES) + b"\xff" * 100,
        bytes(NONCE_BYTES + 100),
        *(
            partial(signed, secret=b"secret", request=request)
            for request in (
                b"",
                b"secret",
                b'{"failure": {}}',
                b'{"failure": 7}',
                b'{"departure": 7}',
                b"\xc3",
                b"[" * 50_000,
                b" " * 70_000,
            )
        ),
    ],
    ids=itertools.count(),
)
def test_invalid_bytes_do_no_harm(status_server, peer, message, capfd):
    assert send(peer.address, message) == b""
    assert peer.failure_report is None
    assert isinstance(status_server.ask({3: peer.address}, LIMIT_S)[3], Status)
    assert capfd.readouterr().err == ""


def test_idle_foreign_clients_take_no_threads_and_delay_no_answer(status_server, peer):
    num_threads = threading.active_count()
    with ExitStack() as stack:
        for _ in range(600):
            foreign = socket.create_connection(peer.address, timeout=LIMIT_S)
            stack.enter_context(foreign).sendall(b"half")
        assert isinstance(status_server.ask({3: peer.address}, LIMIT_S)[3], Status)
        assert threading.active_count() == num_threads


def test_the_connection_of_an_idle_client_is_closed_after_a_time(peer, monkeypatch):
    monkeypatch.setattr("fusco.control.rank_requests._CLIENT_TIMEOUT_S", 0.2)
    with socket.create_connection(peer.address, timeout=LIMIT_S) as foreign:
        foreign.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        foreign.sendall(b"secret")
        assert foreign.recv(1) == b""


def test_reporting_and_asking_start_no_threads(status_server, peer, monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    status_server.report_failure({3: peer.address}, REPORT, LIMIT_S)
    assert peer.failure_report == REPORT
    assert isinstance(status_server.ask({3: peer.address}, LIMIT_S)[3], Status)


@contextmanager
def no_descriptor_left():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as last:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno(), limits[1]))
    taken = []
    try:
        while True:
            taken.append(socket.socket())
    except OSError:
        pass
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for one in taken:
            one.close()


def test_a_rank_that_cannot_be_asked_without_descriptors_is_not_called_dead(status_server, peer):
    with no_descriptor_left():
        answer = status_server.ask({3: peer.address}, LIMIT_S)[3]
    assert answer == Unasked("could not be asked: Too many open files")


def test_a_reason_of_any_length_is_reported(status_server, peer):
    status_server.report_failure({3: peer.address}, FailureReport((2,), "é" * 100_000, 1, has_left=True), LIMIT_S)
    assert peer.failure_report.reason == "é" * 8000


def test_a_rank_that_leaves_reports_it(status_server, peer):
    status_server.report_departure({3: peer.address}, 5, "left", LIMIT_S)
    assert peer.departures == {5: "left"}
    assert peer.failure_report is None


def test_the_thread_that_answers_may_close_the_status_server(status_server):
    """As the garbage collector may run in any thread."""
    done = threading.Event()
    peer = StatusServer("secret", HOST)
    answer = peer.answer
    peer.answer = lambda request: (peer.close(), done.set(), answer(request))[2]
    status_server.ask({3: peer.address}, LIMIT_S)
    assert done.wait(LIMIT_S)


def test_a_rank_that_does_not_answer_is_silent_but_has_not_left(status_server, deaf):
    began = time.monotonic()
    no_answer = status_server.ask({3: deaf}, 0.2)[3]
    assert isinstance(no_answer, NoAnswer)
    assert not no_answer.has_left
    assert "does not answer within 0.2 s" in no_answer.reason
    assert time.monotonic() - began < 0.2 + 1


def test_silent_ranks_are_waited_for_at_once_and_delay_no_answer(status_server, peer, deaf):
    began = time.monotonic()
    answers = status_server.ask({**dict.fromkeys(range(20), deaf), 20: peer.address}, 0.5)
    assert time.monotonic() - began < 2 * 0.5 + 1
    assert [rank for rank, answer in answers.items() if isinstance(answer, Status)] == [20]


def test_a_rank_that_closed_its_status_server_has_left(status_server):
    with closing(StatusServer("secret", HOST)) as gone:
        pass
    no_answer = status_server.ask({3: gone.address}, LIMIT_S)[3]
    assert isinstance(no_answer, NoAnswer)
    assert no_answer.has_left
    status_server.report_failure({3: gone.address}, REPORT, LIMIT_S)  # skipped


def test_many_may_ask_at_once(status_server, peer):
    answers = status_server.ask(dict.fromkeys(range(100), peer.address), LIMIT_S)
    assert all(isinstance(answer, Status) for answer in answers.values())
