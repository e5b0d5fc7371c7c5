"""Failures of ranks as text: once for all ranks with the same one, with a traceback if it is needed."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

from fusco.core.errors import FuscoError, PeerFailureError, RejectedInputError, name_ranks

_LOST_CONNECTION = "gloo/transport"  # in the text of a plain RuntimeError
_NO_MEMORY = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")


@dataclass(frozen=True)
class RankFailure:
    """The reason why a rank has no result."""

    sentence: str  # the failure
    traceback: str = ""  # of the error, if one was raised
    says_enough: bool = True  # whether the sentence explains a mistake of the caller or a limit of the machine
    cause: str = ""  # for an error that follows from another rank's, that rank's failure; empty for all others
    has_died: bool = False  # whether its process has

    @classmethod
    def of(cls, error: BaseException) -> RankFailure:
        """Return the failure of a rank that raised ``error``.

        >>> RankFailure.of(ValueError("no room for 3")).sentence
        'ValueError: no room for 3'
        """
        is_answer = isinstance(error, ValueError | TypeError | FuscoError | MemoryError)
        return cls(
            sentence=f"{type(error).__name__}: {error_text(error)}",
            traceback="".join(traceback.format_exception(error)),
            says_enough=is_answer or bool(_NO_MEMORY.search(str(error))),
            cause=_cause(error),
        )


class RankFailedError(RuntimeError):
    """A function raised on some rank, its process died, or it did not finish.

    The text has all failures, with a traceback of each root cause, or of one rank that gave up if there is none.

    Attributes:
        summary: a line for all ranks with the same failure, and one for all that failed because of others.
        unexpected: the tracebacks of errors whose sentence is not enough; empty if there are none.
    """

    def __init__(self, failures: Mapping[int, RankFailure], late: str = "") -> None:
        lines = _summarize(failures)
        self.summary = "\n".join([*lines, late] if late else lines)
        roots = {rank: each for rank, each in failures.items() if not each.cause} or dict(list(failures.items())[:1])
        tracebacks = dict[str, str]()  # of root causes, by sentence
        for rank, each in roots.items():
            if each.traceback:
                tracebacks.setdefault(each.sentence, f"rank {rank}:\n{each.traceback}")
        needed = {each.sentence for each in roots.values() if not each.says_enough}
        self.unexpected = "\n".join(text for sentence, text in tracebacks.items() if sentence in needed)
        of_others = [f"rank {rank}:\n{each.traceback}" for rank, each in failures.items() if each.cause]
        super().__init__("\n".join([self.summary, *(tracebacks.values() or of_others[:1])]))


class ReportedElsewhereError(RuntimeError):
    """This rank failed, or gave up because another did; another rank of the job reports the cause."""


def _cause(error: BaseException) -> str:
    if isinstance(error, PeerFailureError):
        return error.reason
    # PyTorch's DistError, by name: the command line starts without PyTorch.
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__) or _LOST_CONNECTION in str(error):
        return "torch.distributed lost a connection to another rank"
    return str(error) if isinstance(error, RejectedInputError) else ""


def _summarize(failures: Mapping[int, RankFailure]) -> list[str]:
    """Describe root causes in full, dead processes first; of ranks that failed because of others list all or one."""
    sentence_to_ranks: dict[str, list[int]] = {}
    cause_to_ranks: dict[str, list[int]] = {}
    for rank, failure in sorted(failures.items(), key=lambda item: (not item[1].has_died, item[0])):
        if failure.cause:
            cause_to_ranks.setdefault(failure.cause, []).append(rank)
        else:
            sentence_to_ranks.setdefault(failure.sentence, []).append(rank)
    if sentence_to_ranks and cause_to_ranks:
        consequences = sorted(rank for ranks in cause_to_ranks.values() for rank in ranks)
        sentence_to_ranks["gave up because of that"] = consequences
    else:
        for ranks in cause_to_ranks.values():
            sentence_to_ranks.setdefault(failures[ranks[0]].sentence, []).append(ranks[0])
            if ranks[1:]:
                sentence_to_ranks[f"gave up for the same cause as rank {ranks[0]}"] = ranks[1:]
    return [f"{name_ranks(ranks)}: {sentence}" for sentence, ranks in sentence_to_ranks.items()]


def error_text(error: BaseException) -> str:
    """Return the text of an error; for PyTorch's allocator without the location in its source.

    >>> error_text(RuntimeError("[enforce fail] can't allocate memory: you tried to allocate 5000 bytes. Error 12"))
    'not enough memory for 5,000 bytes'
    """
    refused = _NO_MEMORY.search(str(error))
    return f"not enough memory for {int(refused[1]):,} bytes" if refused else str(error).strip()
