"""Functions on ranks: a fault hits some of them at a chosen point, and the others report what they observed."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import pkgutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import fusco
from scattered_lanes import ScatteredLanes

_ENDING_S = 15.0  # blocked threads end sooner, but not at once on a loaded machine
TIMEOUT_S = 4.0
_MAX_ROUNDS = 3  # a fault is detected in its round, or in the next one if it hits the last step
_NUM_EXPERTS, _NUM_TOPK, _NUM_TOKENS, _HIDDEN = 8, 4, 96, 64
_SHUFFLED_BYTES = 5000
_NUM_CHECKS = 200
_EXCHANGED_BYTES = 3000
_MOVED_BYTES = 1 << 16


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def oversleep() -> None:
    time.sleep(1.5 * TIMEOUT_S)


def nap() -> None:
    time.sleep(0.4 * TIMEOUT_S)


def fail() -> None:
    raise ZeroDivisionError("a bug of the caller")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of some ranks.

    Attributes:
        how: one of the functions above; it causes the fault.
        victims: the ranks with the fault.
        where: ``module:Class.method``; the fault strikes when it is called, before it does anything.
        num_calls_before: successful calls before it, counted from the time given by ``when``.
        when: ``"making"`` the communicator, ``"working"`` with it after one successful round, or ``"closing"`` it.
        times: a folder in which victims store the time at which it struck.
        is_small: whether rows and sums are attached to records.

    """

    how: Callable[[], None]
    victims: tuple[int, ...]
    where: str
    times: Path
    num_calls_before: int = 0
    when: str = "working"
    is_small: bool = False

    def plant(self, rank: int) -> None:
        """Patch ``where`` in this process if the rank is a victim."""
        if rank not in self.victims:
            return
        holder, _, name = self.where.rpartition("." if "." in self.where.partition(":")[2] else ":")
        owner = pkgutil.resolve_name(holder)
        method, calls = getattr(owner, name), itertools.count()

        @functools.wraps(method)
        def struck(*args, **kwargs):
            if next(calls) == self.num_calls_before:
                (self.times / str(rank)).write_text(str(time.monotonic()))
                while not all((self.times / str(victim)).exists() for victim in self.victims):
                    time.sleep(0.001)  # it strikes all victims at once
                self.how()
            return method(*args, **kwargs)

        setattr(owner, name, struck)

    @property
    def struck_at(self) -> float:
        """Time at which it struck the last victim, by the machine's monotonic clock."""
        return max(float((self.times / str(victim)).read_text()) for victim in self.victims)


@dataclass(kw_only=True)
class Fate:
    """Outcome of a rank: its error, if any, the next error, the duration of closing, and resources still held."""

    peers: tuple[int, ...] = ()
    text: str = ""
    raised_at: float = 0.0
    later_error: str = ""
    closing_s: float = 0.0
    still_held: list[str] = field(default_factory=list)

    def note(self, error: fusco.PeerFailureError) -> None:
        """Record an error that was just caught."""
        self.peers, self.text, self.raised_at = error.peers, str(error), time.monotonic()


def between_calls() -> None:
    """Marker for the computation of a rank outside any call: a place for faults."""


def no_op(group: dist.ProcessGroup) -> None:
    """Do nothing: a caller that waits for it knows that all processes have started."""


def run_with_fault(
    group: dist.ProcessGroup,
    ranks_per_node: int,
    fault: Fault,
    work: Callable[[fusco.Communicator], None] | None = None,
) -> Fate:
    """Create a communicator, run ``work`` (default: every collective in turn) until a rank fails, and close it."""
    fate, rank = Fate(), dist.get_rank(group)
    if fault.when == "making":
        fault.plant(rank)
    try:
        with _open(group, ranks_per_node, is_small=fault.is_small) as communicator:
            try:
                _work(communicator, fault, work or _round)
            except fusco.PeerFailureError as error:
                fate.note(error)
                fate.later_error = _error_of(lambda: communicator.shuffle({}, {}))
            began_to_close = time.monotonic()
        fate.closing_s = time.monotonic() - began_to_close
    except fusco.PeerFailureError as error:
        fate.note(error)
    fate.still_held = held_in_the_end()
    return fate


def held_in_the_end(before: Iterable[str] = ()) -> list[str]:
    """Return resources beyond ``before`` that are still held after threads blocked on the network had time to end."""
    deadline = time.monotonic() + _ENDING_S
    while True:
        gc.collect()  # the error's traceback references tensors in shared memory
        if not (still := [*(Counter(held()) - Counter(before)).elements()]) or time.monotonic() > deadline:
            return still
        time.sleep(0.05)


def hold_open(group: dist.ProcessGroup, ranks_per_node: int, signs: Path) -> list[str]:
    """Keep a communicator open until the file ``seen`` exists in ``signs``; return the resources it held."""
    with _open(group, ranks_per_node):
        (signs / f"open on {group.rank()}").touch()
        while not (signs / "seen").exists():
            time.sleep(0.01)
        return held()


def _open(group: dist.ProcessGroup, ranks_per_node: int, *, is_small: bool = False) -> fusco.Communicator:
    return fusco.Communicator(
        group,
        num_experts=_NUM_EXPERTS,
        num_topk=_NUM_TOPK,
        max_tokens_per_rank=_NUM_TOKENS,
        max_bytes_per_token=_HIDDEN * 4,
        ranks_per_node=ranks_per_node,
        # So every rank carries rows, unless they are to be attached.
        balancer=None if is_small else ScatteredLanes(_NUM_TOKENS * (group.size() // ranks_per_node - 1)),
        # Slices of two rows, so that a fault finds every step half done.
        settings=fusco.Settings(timeout_s=TIMEOUT_S, slice_bytes=None if is_small else 1, ring_depth=2),
    )


def _work(communicator: fusco.Communicator, fault: Fault, work: Callable[[fusco.Communicator], None]) -> None:
    work(communicator)
    if fault.when == "making":
        return
    fault.plant(communicator.rank)
    if fault.when == "working":
        for _ in range(_MAX_ROUNDS):
            work(communicator)


def exchange(communicator: fusco.Communicator) -> None:
    """Run an all-to-all in which ranks of a node exchange bytes before and after they are sent between nodes."""
    rank, num_ranks = communicator.rank, communicator.topology.world_size
    send = [_EXCHANGED_BYTES * (1 + (rank + 2 * peer) % 4) for peer in range(num_ranks)]
    receive = [_EXCHANGED_BYTES * (1 + (peer + 2 * rank) % 4) for peer in range(num_ranks)]
    rows, output = torch.ones(sum(send), dtype=torch.uint8), torch.empty(sum(receive), dtype=torch.uint8)
    communicator.all_to_all(output, rows, receive, send)


def move(communicator: fusco.Communicator) -> None:
    """Move an expert from each rank to the next in steps; after a failure this rank has the old one, or the new one."""
    rank, num_ranks = communicator.rank, communicator.topology.world_size
    old, new = [[each] for each in range(num_ranks)], [[(each - 1) % num_ranks] for each in range(num_ranks)]
    weights = torch.full((1, _MOVED_BYTES), rank, dtype=torch.uint8)
    try:
        communicator.start_moving_experts([weights], old, new, pace=fusco.Pace(step_bytes=_MOVED_BYTES // 8)).wait()
    except fusco.PeerFailureError:
        assert weights.unique().tolist() in (old[rank], new[rank]), "half an expert"
        raise
    assert weights.unique().tolist() == new[rank]


def check_often(communicator: fusco.Communicator) -> None:
    """Dispatch once, then only check, as a loop between steps does."""
    ids = torch.zeros(_NUM_TOKENS, _NUM_TOPK, dtype=torch.int64)
    communicator.dispatch(torch.ones(_NUM_TOKENS, _HIDDEN), ids)
    between_calls()
    for _ in range(_NUM_CHECKS):
        communicator.check()
        time.sleep(0.001)


def _round(communicator: fusco.Communicator) -> None:
    """Run every collective once: dispatch, combine, their backward passes, shuffle."""
    x = torch.ones(_NUM_TOKENS, _HIDDEN, requires_grad=True)
    topk_idx = (torch.arange(_NUM_TOKENS)[:, None] + torch.arange(_NUM_TOPK)) % _NUM_EXPERTS
    dispatched = communicator.dispatch(x, topk_idx, torch.ones(_NUM_TOKENS, _NUM_TOPK))
    between_calls()
    communicator.combine(dispatched.rows, dispatched.handle).sum().backward()

    everyone = range(communicator.topology.world_size)
    whole = torch.tensor([0]), torch.tensor([_SHUFFLED_BYTES])
    payloads = [torch.ones(len(everyone), _SHUFFLED_BYTES, dtype=torch.uint8) for _ in ("send", "receive")]
    send, receive = ({rank: fusco.Segments(rows[rank], *whole) for rank in everyone} for rows in payloads)
    communicator.shuffle(send, receive)


def _error_of(call: Callable[[], None]) -> str:
    try:
        call()
    except fusco.FuscoError as error:
        return type(error).__name__
    return ""


def held() -> list[str]:
    """Shared memory that this process has mapped or open, and the memory maps of processes that it watches."""
    links = [name for _, name in open_files()]
    maps = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return [name for name in links + maps if name.startswith("/dev/shm/") or name.endswith("/statm")]


def open_files(pid: int | str = "self") -> list[tuple[Path, str]]:
    """Descriptors of a process in /proc and their targets, except those closed in the meantime."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append((entry, os.readlink(entry)))
    return found
