"""A program on the ranks of a testbed, started as torchrun would start it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from fusco.core.environment import RAILS_VARIABLE
from fusco.testbed.layout import interface
from fusco.testbed.testbed import Testbed

_PORT = 29500  # of the store, on host 0
# Limit of the other ranks' end once one has failed.
_GRACE_S = 30.0
_POLL_S = 0.05


def rank_environment(testbed: Testbed, host: int, local_rank: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank, and those by which fusco, gloo and NCCL use its rails."""
    layout = testbed.layout
    rails = [interface(rail) for rail in layout.rails_of(local_rank)]
    own = {RAILS_VARIABLE: ",".join(rails)} if len(rails) > 1 else {}
    return own | {
        "RANK": str(host * layout.ranks_per_host + local_rank),
        "WORLD_SIZE": str(layout.num_hosts * layout.ranks_per_host),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(layout.ranks_per_host),
        "GROUP_RANK": str(host),
        "MASTER_ADDR": testbed.address(0, 0),
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": rails[0],
        # No host here has a name server; torch warns of every address that it cannot resolve.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "NCCL_SOCKET_IFNAME": "=" + ",".join(rails),
    }


def exit_code(returncode: int) -> int:
    """Return the exit code of a process for a shell: 128 and the number of the signal that has ended it.

    >>> exit_code(3), exit_code(-9)
    (3, 137)
    """
    return returncode if returncode >= 0 else 128 - returncode


def run_job(testbed: Testbed, command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run a command on every rank of a testbed and return 0, or the exit code of the first that fails.

    ``environment`` is by default that of this process; what torchrun would set is added to it. Once one has failed, the
    others have 30 seconds to end. The exit code of a process that a signal has ended is that of a shell.
    """
    layout, inherited = testbed.layout, os.environ if environment is None else environment
    running = [
        testbed.spawn(host, command, local_rank=rank, env={**inherited, **rank_environment(testbed, host, rank)})
        for host in range(layout.num_hosts)
        for rank in range(layout.ranks_per_host)
    ]
    failed, deadline = 0, float("inf")
    while running and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        ended = [process for process in running if process.poll() is not None]
        running = [process for process in running if process not in ended]
        codes = [exit_code(process.returncode) for process in ended if process.returncode]
        if codes and not failed:
            failed, deadline = codes[0], time.monotonic() + _GRACE_S
    for process in running:
        process.kill()
    return failed
