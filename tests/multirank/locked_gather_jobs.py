"""Functions on ranks: all-gathers of members between waits that hold the interpreter's lock."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist

from fusco.control import member_gather
from fusco.control.member_board import View
from fusco.control.member_gather import MemberGather
from fusco.control.status_server import StatusServer

NUM_ROUNDS = 20
_LIMIT_S = 20.0
_RECEIVE = ctypes.PyDLL(None, use_errno=True).recv  # holds the lock


class _NoneIsDead:
    operation = "shrink"

    def is_dead(self, _: object) -> bool:
        return False

    def note_failure(self, *_: object) -> None: ...


def receive_after_gathers(group: dist.ProcessGroup, folder: Path, reminder_s: float) -> int:
    """Receive from all others after every gather, as PyTorch's rendezvous does; return how many messages came."""
    rank, size, num_received = dist.get_rank(group), dist.get_world_size(group), 0
    server, addresses = StatusServer("secret", "127.0.0.1"), [None] * size
    dist.all_gather_object(addresses, server.address, group)
    members = {number: SimpleNamespace(address=address, host="host") for number, address in enumerate(addresses)}
    gather = MemberGather(server, _NoneIsDead(), View(1, tuple(range(size))), rank, members, size, _LIMIT_S)
    gather.begin()
    with mock.patch.object(member_gather, "_REMINDER_S", reminder_s):
        for number in range(NUM_ROUNDS):
            path = folder / f"{os.getpid()}-{number}"
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
                own.bind(str(path))
                own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(_LIMIT_S / 4), 0))
                paths = gather.all_gather(f"round {number}", str(path))
                for other in {*range(size)} - {rank}:
                    own.sendto(b"message", paths[other])
                num_received += sum(_RECEIVE(own.fileno(), bytes(8), 8, 0) == 7 for _ in range(size - 1))
            gather.all_gather(f"end of round {number}", None)
    dist.barrier(group)
    server.close()
    return num_received
