"""Names that the command line and the benchmarks share. This loads nothing, so that ``--help`` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

STDOUT = Path("-")  # given as a file for JSON lines
MAX_CASE_S = 600.0  # of a case of ``fusco bench rails``

# Traffic patterns: the destinations of tokens. The last four are workloads of Megatron-LM's pull request 7488.
Pattern = Literal[
    "trace", "uniform", "single-node", "imbalanced", "zipf", "one-rank", "one-expert", "one-prompt", "ragged",
    "round-robin", "hot-experts", "hot-spread", "idle-experts",
]  # fmt: skip
REPLAYED = ("trace", "one-prompt", "ragged")  # routing of a trace; the last two are prefills

# The names of ``fusco.simulate.systems.SYSTEMS``; a test compares them.
SYSTEMS = (
    *("fusco", "no-lanes", "rotation", "no-balancer", "no-engine", "no-planner", "fusco-paper"),
    *("fusco-paper-no-balancer", "fusco-paper-no-engine", "fusco-paper-no-planner", "nccl", "deepep", "direct-pxn"),
    *("fast", "spread-out", "padded", "direct"),
)
MOST_DRAWN_RANKS = 1024  # for which ``fusco simulate`` draws tokens

# Off-diagonal entries of a matrix: all equal; uniformly distributed from 1 to the largest; the k-th largest one
# proportional to k ** -skew, in random places.
MatrixKind = Literal["uniform", "random", "zipf"]
# Bytes that ranks send each other in an all-to-all: as in a ``MatrixKind``, or tokens of captured routing, one copy for
# each expert, as in an all-to-all of a MoE layer.
ExchangeMatrix = Literal["uniform", "random", "zipf", "trace"]
# Tokens of each rank in a prefill: a prompt of the Azure trace, or as many prompts as fit.
Prefill = Literal["one-prompt", "ragged"]
# Tokens of each rank in a draw of ``fusco bench balancers``: Beta(0.2, 0.2) of the same number, or those of a prefill.
Loads = Literal["bimodal", "one-prompt", "ragged"]
