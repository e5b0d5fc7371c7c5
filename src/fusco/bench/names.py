"""Names that the command line and the benchmarks share. This loads nothing, so that ``--help`` is fast."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Literal

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


# Off-diagonal entries of a matrix: all equal; uniformly distributed from 1 to the largest; the k-th largest one
# proportional to k ** -skew, in random places.
MatrixKind = Literal["uniform", "random", "zipf"]
# Bytes that ranks send each other in an all-to-all: as in a ``MatrixKind``, or tokens of captured routing, one copy for
# each expert, as in an all-to-all of a MoE layer.
ExchangeMatrix = Literal["uniform", "random", "zipf", "trace"]
# Tokens of each rank in a draw of ``fusco bench balancers``: Beta(0.2, 0.2) of the same number; a prompt of the Azure
# trace, at most 8192 tokens; as many prompts as fit into 8192 tokens.
Loads = Literal["bimodal", "one-prompt", "ragged"]
