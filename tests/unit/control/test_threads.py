"""Calls in daemon threads do not end the process when the interpreter exits."""

import subprocess
import sys

# A thread that asks the process group's store until it is told to end, as after a wait that was given up.
SCRIPT = """
import time
from datetime import timedelta
from torch.distributed import TCPStore
from fusco.control.threads import in_thread

store, until = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5)), time.monotonic() + 0.3

def ask():
    while time.monotonic() < until:
        store.check(["nothing"])

in_thread(ask)
time.sleep(0.05)
"""


def test_a_thread_that_is_inside_pytorch_does_not_abort_the_process():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
