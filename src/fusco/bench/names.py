"""Names that the command line and the benchmarks share. This loads nothing, so that ``--help`` is fast."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

STDOUT = Path("-")  # given as a file for JSON lines


class Pattern(str, Enum):
    """Traffic patterns: the destinations of tokens."""

    TRACE = "trace"
    UNIFORM = "uniform"
    SINGLE_NODE = "single-node"
    IMBALANCED = "imbalanced"
    ZIPF = "zipf"
    ONE_RANK = "one-rank"
    ONE_EXPERT = "one-expert"


class MatrixKind(str, Enum):
    """Distributions of a matrix's off-diagonal entries."""

    UNIFORM = "uniform"  # all equal
    RANDOM = "random"  # uniformly distributed from 1 to the largest
    ZIPF = "zipf"  # the k-th largest is proportional to k ** -skew, in random places


class ExchangeMatrix(str, Enum):
    """Bytes that ranks send each other in an all-to-all: as in ``MatrixKind``, or those of a trace."""

    UNIFORM = "uniform"
    RANDOM = "random"
    ZIPF = "zipf"
    TRACE = "trace"  # tokens of captured routing, one copy for each expert, as in an all-to-all of a MoE layer


class Loads(str, Enum):
    """Tokens of each rank in a draw of ``fusco bench balancers``."""

    BIMODAL = "bimodal"  # Beta(0.2, 0.2) of the same number
    ONE_PROMPT = "one-prompt"  # a prompt of the Azure trace, at most 8192 tokens
    RAGGED = "ragged"  # as many prompts as fit into 8192 tokens
