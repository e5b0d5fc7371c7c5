"""Programs in processes that are forked from an interpreter, which has imported what all of them begin with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

_SERVE = """
import json, os, signal, sys

def next_program():
    for line in sys.stdin:
        program, limit_s, processes = json.loads(line)
        children = []
        for arguments, *files in processes:
            if not (child := os.fork()):
                signal.alarm(limit_s)
                for number, path in enumerate((os.devnull, *files)):
                    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
                sys.argv[1:] = arguments
                return program
            children.append(child)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
    return ""

exec(next_program())
"""


class Ended(NamedTuple):
    """A process that has ended; its code is -14 if that took too long."""

    code: int
    stdout: str
    stderr: str


class ForkedInterpreter(AbstractContextManager["ForkedInterpreter"]):
    """Runs programs as ``python -c``, after ``imports``: interpreters that begin and end anew but for these."""

    def __init__(self, imports: str) -> None:
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", imports + _SERVE]
        self._server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=variables)

    def run(self, program: str, *arguments: list[str], limit_s: int = 60) -> list[Ended]:
        """Run a program in a process for each list of arguments, all at once."""
        assert self._server.stdin
        assert self._server.stdout
        with tempfile.TemporaryDirectory() as folder:
            files = [[f"{folder}/{index}.{name}" for name in ("out", "err")] for index in range(len(arguments))]
            processes = [[each, *paths] for each, paths in zip(arguments, files, strict=True)]
            print(json.dumps([program, limit_s, processes]), file=self._server.stdin, flush=True)
            codes = json.loads(self._server.stdout.readline())
            printed = [[Path(path).read_text() for path in paths] for paths in files]
        return [Ended(code, *texts) for code, texts in zip(codes, printed, strict=True)]

    def __exit__(self, *_: object) -> None:
        self._server.communicate(timeout=20)
