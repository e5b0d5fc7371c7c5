"""What went wrong on ranks, in words: once for all that say the same, with a traceback where one is of use."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from fusco.core.errors import FuscoError, PeerFailureError, RejectedInputError

_NO_MEMORY = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")


@dataclass(frozen=True)
class RankFailure:
    """Why a rank has no result.

    Attributes:
        sentence: what happened.
        traceback: of the error, if one was raised.
        says_enough: whether the sentence answers the caller's input, or names the machine's limits.
        cause: of an error that follows from another rank's: what that rank did; empty for all others.

    """

    sentence: str
    traceback: str = ""
    says_enough: bool = True
    cause: str = ""

    @classmethod
    def of(cls, error: BaseException) -> RankFailure:
        """An error that a rank raised.

        >>> RankFailure.of(ValueError("no room for 3")).sentence
        'ValueError: no room for 3'
        """
        is_answer = isinstance(error, ValueError | TypeError | FuscoError | MemoryError)
        return cls(
            sentence=f"{type(error).__name__}: {in_words(error)}",
            traceback="".join(traceback.format_exception(error)),
            says_enough=is_answer or bool(_NO_MEMORY.search(str(error))),
            cause=_cause(error),
        )


class RankFailedError(RuntimeError):
    """A function raised on some rank, its process died, or it did not come to an end; the text has it all.

    Attributes:
        summary: what failed, a line for all ranks that say the same, and one for all that failed because of others.
        unexpected: the tracebacks of errors whose sentence does not say enough; empty if all do.

    """

    def __init__(self, failures: Mapping[int, RankFailure], late: str = "") -> None:
        lines = _summarize(failures)
        self.summary = "\n".join([*lines, late] if late else lines)
        rank_to_traceback = {
            rank: f"rank {rank}:\n{each.traceback}" for rank, each in failures.items() if each.traceback
        }
        self.unexpected = "\n".join(text for rank, text in rank_to_traceback.items() if not failures[rank].says_enough)
        super().__init__("\n".join([self.summary, *rank_to_traceback.values()]))


class ReportedElsewhereError(RuntimeError):
    """This rank failed, or gave up because another did; another rank of the job reports the cause."""


def _cause(error: BaseException) -> str:
    if isinstance(error, PeerFailureError):
        return error.reason
    return str(error) if isinstance(error, RejectedInputError) else ""


def _summarize(failures: Mapping[int, RankFailure]) -> list[str]:
    """Root causes in full; of the ranks that failed because of others which they are, or one of them in full."""
    sentence_to_ranks: dict[str, list[int]] = {}
    cause_to_ranks: dict[str, list[int]] = {}
    for rank, failure in sorted(failures.items()):
        if failure.cause:
            cause_to_ranks.setdefault(failure.cause, []).append(rank)
        else:
            sentence_to_ranks.setdefault(failure.sentence, []).append(rank)
    if sentence_to_ranks and cause_to_ranks:
        called_off = sorted(rank for ranks in cause_to_ranks.values() for rank in ranks)
        sentence_to_ranks["gave up because of that"] = called_off
    else:
        for ranks in cause_to_ranks.values():
            sentence_to_ranks.setdefault(failures[ranks[0]].sentence, []).append(ranks[0])
            if ranks[1:]:
                sentence_to_ranks[f"gave up for the same cause as rank {ranks[0]}"] = ranks[1:]
    return [f"{_name(ranks)}: {sentence}" for sentence, ranks in sentence_to_ranks.items()]


def in_words(error: BaseException) -> str:
    """The text of an error, that of PyTorch's allocator without the place in its source.

    >>> in_words(RuntimeError("[enforce fail] can't allocate memory: you tried to allocate 5000 bytes. Error code 12"))
    'there is no memory for 5,000 bytes'
    """
    refused = _NO_MEMORY.search(str(error))
    return f"there is no memory for {int(refused[1]):,} bytes" if refused else str(error).strip()


def _name(ranks: Sequence[int]) -> str:
    """Ranks in ascending order, runs of them by their ends.

    >>> _name([1]), _name([0, 1, 2, 5])
    ('rank 1', 'ranks 0-2, 5')
    """
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])]
    names = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"
