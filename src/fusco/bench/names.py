"""The names that the command line and the benchmarks share; this loads nothing, so that ``--help`` answers at once."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

STDOUT = Path("-")  # given as a file for JSON lines


class Pattern(str, Enum):
    """Where tokens go."""

    TRACE = "trace"
    UNIFORM = "uniform"
    SINGLE_NODE = "single-node"
    IMBALANCED = "imbalanced"
    ZIPF = "zipf"
    ONE_RANK = "one-rank"
    ONE_EXPERT = "one-expert"


class MatrixKind(str, Enum):
    """How the off-diagonal entries of a matrix are drawn."""

    UNIFORM = "uniform"  # all alike
    RANDOM = "random"  # uniformly distributed from 1 to the largest
    ZIPF = "zipf"  # the k-th largest is proportional to k ** -skew, in random places


class ExchangeMatrix(str, Enum):
    """What ranks send each other in an all-to-all: as in ``MatrixKind``, or a trace's."""

    UNIFORM = "uniform"
    RANDOM = "random"
    ZIPF = "zipf"
    TRACE = "trace"  # tokens of captured routing, one copy for each expert, as in an all-to-all of a MoE layer
