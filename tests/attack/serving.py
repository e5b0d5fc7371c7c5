"""Processes that serve one communicator until they are told to stop: each says what happens to it."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # as the first backward pass of given gradients does, 32 MiB
from elastic_jobs import arguments_of, still_held
from members import Members
from rank_setup import Setup

import fusco
from attack.on_ranks import Holdings
from attack.rounds import work

_START_S = 120.0  # of the wait for all processes, on a loaded machine


@dataclass(frozen=True, kw_only=True)
class Service:
    """What all processes of a communicator know.

    Attributes:
        port: of the store.
        num_ranks: ranks of the communicator.
        setup: its arguments.
        rails: interfaces for ``FUSCO_RAILS``, or ``""``.
        name: seeds the rounds.
        environments: variables of each rank, which NCCL reads.
    """

    port: int
    num_ranks: int
    setup: Setup
    rails: str
    name: tuple[int | str, ...]
    environments: tuple[dict[str, str], ...]

    @property
    def is_on_cpu(self) -> bool:
        """Whether ranks have no GPU: libraries of CUDA hold files and memory of their own."""
        return self.setup.device == "cpu"


@dataclass(frozen=True, kw_only=True)
class Right:
    """A rank has done a round right for the first time with these members.

    Attributes:
        at: the machine's monotonic clock.
        pids: the processes of the members, by rank.
        lost: experts that are lost.
        named: ranks that failures have named since the last message.
        named_at: when the first of these failures was raised.
        gone: ranks that ``shrink`` has returned since then.
        shrunk_at: when it last returned.
        texts: of these failures.
        holdings: resources of the process.
    """

    at: float
    pids: dict[int, int]
    lost: tuple[int, ...]
    named: tuple[int, ...]
    named_at: float
    gone: tuple[int, ...]
    shrunk_at: float
    texts: tuple[str, ...]
    holdings: Holdings


@dataclass(frozen=True, kw_only=True)
class End:
    """A process has closed its communicator: what it still holds, and the text of an ``ExcludedError``."""

    still_held: list[str] = field(default_factory=list)
    excluded: str = ""


def serve(service: Service, rank: int, pipe: Connection, *, is_new: bool) -> None:
    """Serve as a rank; send ``Right``, then ``End``, or the error of the process."""
    gc.freeze()  # looks at what is held are short then
    torch.set_num_threads(1)
    os.environ.update(service.environments[rank], FUSCO_RAILS=service.rails)
    if not service.is_on_cpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    try:
        pipe.send(_served(service, rank, pipe, is_new=is_new))
    except BaseException as error:
        pipe.send(error)
        raise


def _served(service: Service, rank: int, pipe: Connection, *, is_new: bool) -> End:
    store = dist.TCPStore("127.0.0.1", service.port, is_master=False, timeout=timedelta(seconds=_START_S))
    if is_new:
        comm = _joined(service, rank, store)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=service.num_ranks)
        comm = service.setup.open(dist.group.WORLD)
    excluded = ""
    try:
        _serve_until_told(comm, service, store, pipe, is_new=is_new)
    except fusco.ExcludedError as error:
        excluded = str(error)
    with contextlib.suppress(fusco.PeerFailureError):  # of a rank that has been killed meanwhile
        comm.close()
    return End(still_held=still_held() if service.is_on_cpu else [], excluded=excluded)


def _joined(service: Service, rank: int, store: dist.Store) -> fusco.Communicator:
    """Join, again if others fail meanwhile: then processes that join are left out."""
    while True:
        try:
            comm = fusco.Communicator.join(store, rank=rank, **arguments_of(service.setup))
            return service.setup.on_device(comm)
        except fusco.PeerFailureError:
            time.sleep(0.01)


def _serve_until_told(
    comm: fusco.Communicator, service: Service, store: dist.Store, pipe: Connection, *, is_new: bool
) -> None:
    """Do rounds with the ranks that are left and those that join, until this process and all others are told to end.

    One that ``is_new`` begins behind the others' call of ``grow``.
    """
    members, turn, shrinks = Members(comm, service.num_ranks), 0, False
    said: dict[int, int] = {}
    failures, gone = list[fusco.PeerFailureError](), set[int]()
    named_at = shrunk_at = 0.0
    while True:
        try:
            if shrinks:
                gone |= {*comm.shrink()}
                shrinks, turn, shrunk_at = False, 0, time.monotonic()
            if not is_new and len(comm.ranks) < service.num_ranks and comm.grow(store):
                turn = 0
            is_new = False
            work(members, service.setup, *service.name, str(comm.ranks), turn)
            turn += 1
            pids = {rank: each.pid for rank, each in comm._session.connections.members.items()}
            if said != pids or failures:
                message = Right(
                    at=time.monotonic(),
                    pids=pids,
                    lost=comm.lost_experts,
                    named=tuple({peer for error in failures for peer in error.peers}),
                    named_at=named_at,
                    gone=tuple(gone),
                    shrunk_at=shrunk_at,
                    texts=tuple(map(str, failures)),
                    holdings=Holdings.now(),
                )
                pipe.send(message)
                said, failures, gone = pids, [], set()
            is_told = torch.full((len(comm.ranks), 1), float(pipe.poll()))
            told = members.all_to_all(None, is_told)
            comm.synchronize()  # on CUDA only this says that a rank has failed, whose part is undefined
            if bool(told.min()):
                return
        except fusco.ExcludedError:
            raise
        except fusco.PeerFailureError as error:
            named_at = named_at if failures else time.monotonic()
            failures.append(error.with_traceback(None))
            shrinks = True
