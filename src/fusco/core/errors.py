"""Error types of fusco, all of them ``FuscoError``; invalid arguments raise plain ``ValueError`` and ``TypeError``."""

from __future__ import annotations

import errno
import resource
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby


class FuscoError(RuntimeError):
    """Base of the errors that fusco raises while it runs."""


class ClosedError(FuscoError):
    """A communicator was used after ``close()``, or after a failure that broke it."""


class ThreadError(FuscoError):
    """A thread used a communicator that belongs to another thread."""


class SharedMemoryError(FuscoError):
    """Peer-visible memory could not be allocated, or a peer's segment could not be opened."""


class OutputMemoryError(FuscoError):
    """Memory for an output could not be allocated inside a collective; the communicator can only be closed."""


class TransportError(FuscoError):
    """The process group's store or the network between nodes could not be reached."""


class CompileError(FuscoError):
    """A kernel could not be compiled."""


class LaunchError(FuscoError):
    """Loading or launching a kernel failed, possibly because of an earlier asynchronous CUDA error."""


class RowOverflowError(FuscoError):
    """A routing needed more rows than a static output, or a message between nodes, has; the others are missing.

    Attributes:
        num_rows: rows of the output, of each expert, or of the message.
        num_rows_needed: rows that the routing needed; of an output, including padding.
        node: the node that a message goes to; ``None`` if the output was too small.
        local_expert: with ``rows_per_expert``, the index among this rank's experts of the one that needed the most
            rows, the first of them if there are several; else ``None``.
    """

    def __init__(
        self, rank: int, num_rows: int, num_rows_needed: int, node: int | None = None, local_expert: int | None = None
    ) -> None:
        self.num_rows, self.num_rows_needed = num_rows, num_rows_needed
        self.node, self.local_expert = node, local_expert
        if local_expert is not None:
            what = f"needed {num_rows_needed} rows for its local expert {local_expert} in a dispatch into static rows"
            limit = f"StaticRows(rows_per_expert={num_rows})"
        elif node is None:
            what = f"needed {num_rows_needed} expert-major rows in a dispatch into static rows"
            limit = f"StaticRows({num_rows})"
        else:
            what = f"had {num_rows_needed} tokens for node {node} in a dispatch into static rows"
            limit = f"StaticRows(max_rows_to_node={num_rows})"
        super().__init__(
            f"rank {rank} {what}, but had {limit}; rows that did not fit are missing. Give it more, or pass "
            f"on_overflow='drop'"
        )


class MismatchError(FuscoError, ValueError):
    """Ranks disagree on something they must agree on. Every rank of the group raises it."""


class GrowthError(MismatchError):
    """A dispatch needs more room than there is, on all ranks, which make it and dispatch again."""


class RejectedInputError(FuscoError, ValueError):
    """Another rank rejected its input, so the collective was cancelled on every rank."""


@dataclass(frozen=True)
class Stall:
    """Description of a wait, for the error if it times out.

    ``phase`` names the step, ``on_ranks`` the ranks that are waited for, ``expected`` the data that should have come
    from them, and ``seen`` what has come. ``is_for_local_device`` if this rank waits for its local device; any rank
    that dies may then be the one that the device waits for.
    """

    phase: str
    on_ranks: tuple[int, ...]
    expected: str
    seen: str
    is_for_local_device: bool = False


class PeerFailureError(FuscoError):
    """A rank died, stopped, or did not join within the limit.

    Attributes:
        rank: the rank that raises.
        peers: the ranks at fault; none if a rank waited for its local device while all others were alive.
        operation: the collective that was under way, for example ``"dispatch #3"``.
        stall: the wait of this rank (phase, ranks, expected, seen).
        reason: the cause, for example ``"rank 2 (pid 4711) is dead"``.
        has_left: whether the ranks at fault are dead or have closed their communicator.
    """

    def __init__(
        self, *, rank: int, peers: tuple[int, ...], operation: str, stall: Stall, reason: str, has_left: bool
    ) -> None:
        self.rank, self.peers, self.operation, self.stall = rank, peers, operation, stall
        self.reason, self.has_left = reason, has_left
        waited_for = f"rank(s) {', '.join(map(str, stall.on_ranks))}" if stall.on_ranks else "no other rank"
        super().__init__(
            f"rank {rank} gave up in {operation}, phase '{stall.phase}', waiting for {waited_for}: "
            f"expected {stall.expected}, saw {stall.seen}. Cause: {reason}"
        )


class ExcludedError(PeerFailureError):
    """The other ranks go on without this one, which was silent for too long or was told to leave.

    The communicator can only be closed. Attributes are those of ``PeerFailureError``; ``peers`` are the ranks that go
    on.
    """


@contextmanager
def cleanup_after(error: BaseException | None, what: str) -> Iterator[None]:
    """Clean up after an error: if the block fails, too, add ``what`` and its error to the first one as a note.

    Without a first error, that of the block is raised.
    """
    try:
        yield
    except Exception as second:
        if error is None:
            raise
        note(error, f"{what}: {type(second).__name__}: {second}")


def note(error: BaseException, text: str) -> None:
    """Add a note to an error; before Python 3.11, which has no notes, warn instead."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error's text, without the traces of C++; its type if it has no text.

    >>> first_line(RuntimeError("no memory\nException raised from alloc at ...")), first_line(MemoryError())
    ('no memory', 'MemoryError')
    """
    return next(filter(str.strip, str(error).splitlines()), type(error).__name__)


def reason_of(error: OSError) -> str:
    """Return the operating system's message, with the limit of this process that caused it."""
    limits = {
        errno.EMFILE: f"; this process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,} (ulimit -n)",
        errno.ENFILE: "; all processes of this machine together have as many as it allows (sysctl fs.file-max)",
    }
    return f"{error.strerror or error}{limits.get(error.errno or 0, '')}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks, given in ascending order; consecutive ones as a range.

    >>> name_ranks([1]), name_ranks([0, 1, 2, 5])
    ('rank 1', 'ranks 0-2, 5')
    """
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])]
    names = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"
