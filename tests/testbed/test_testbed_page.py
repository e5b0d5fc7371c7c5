"""The example of docs/testbed.md, with programs for its two ends."""

from __future__ import annotations

from snippets import python_of

SERVER = "import socket, sys; s = socket.create_server((sys.argv[1], 4711)); s.accept()[0].sendall(b'x' * 9999)"
CLIENT = """
import socket, sys, time
for _ in range(100):
    try:
        s = socket.create_connection((sys.argv[1], 4711), 1.0)
        break
    except OSError:
        time.sleep(0.1)
while s.recv(4096):
    pass
"""


def test_the_snippet_of_testbed_runs(monkeypatch, tmp_path, capsys):
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "client.py").write_text(CLIENT)
    monkeypatch.chdir(tmp_path)
    (snippet,) = python_of("docs/testbed.md")
    exec(snippet, {})
    assert "RailCounters(sent_bytes=" in capsys.readouterr().out
