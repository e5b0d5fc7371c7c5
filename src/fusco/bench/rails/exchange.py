"""Skewed all-to-all between experts, and pulls of embeddings (FuseLink, Figures 12 and 13)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fusco.bench.rails import roles
from fusco.bench.rails.crew import Crew
from fusco.bench.rails.record import CaseResult, line_rate
from fusco.rails import POLICIES, Policy
from fusco.testbed import Testbed

_MEAN_S = 0.05  # that the mean worker's bytes take at its rail's rate: 12.5 MB at 2 Gbit/s
_ZIPF = 1.0  # exponent of the popularity of embeddings


def measure_all_to_all(bed: Testbed, policies: list[str], seconds: float) -> Iterator[CaseResult]:
    """Measure iterations in which every worker sends to all workers of the other host, those of popular experts more.

    That is how combine returns the rows of a skewed dispatch.
    """
    num, rng = bed.layout.num_rails, np.random.default_rng(0)
    for skew in (0.0, 0.5, 1.0):
        popularity = np.arange(1, num + 1.0) ** -skew
        shares = [rng.permutation(popularity / popularity.sum()) for _ in range(2)]
        per_host = num * _MEAN_S * 1e9 * line_rate(bed)
        matrices = [np.repeat(share[:, None] * per_host / num, num, 1).astype(int) for share in shares]
        yield from _compare(bed, policies, seconds, f"all-to-all, Zipf {skew:g}", matrices)


def measure_embeddings(bed: Testbed, policies: list[str], seconds: float) -> Iterator[CaseResult]:
    """Measure iterations in which workers pull the embeddings that their caches lack, and send gradients back."""
    num, rng = bed.layout.num_rails, np.random.default_rng(1)
    num_rows, popularity = 100_000, np.arange(1, 100_001.0) ** -_ZIPF
    popularity /= popularity.sum()
    batches = rng.lognormal(0.0, 0.5, num)
    for cached in (0.001, 0.01, 0.1):
        missed = popularity[int(cached * num_rows) :].sum()
        num_bytes = (batches / batches.mean() * missed * 2 * _MEAN_S * 1e9 * line_rate(bed)).astype(int)
        # Worker w pulls from server w and returns gradients of a quarter of the rows.
        matrices = [np.diag(num_bytes), np.diag(num_bytes // 4)]
        yield from _compare(bed, policies, seconds, f"embeddings, {cached:.1%} cached", matrices)


def _compare(
    bed: Testbed, policies: list[str], seconds: float, case: str, matrices: list[np.ndarray]
) -> Iterator[CaseResult]:
    bound_s = max(matrix.sum(1).max() for matrix in matrices) / 1e9 / line_rate(bed)  # rail i leads to rail i
    even_s = max(matrix.sum() for matrix in matrices) / bed.layout.num_rails / 1e9 / line_rate(bed)
    for name in policies:
        time_s = run(bed, POLICIES[name], matrices, max(3, int(seconds / bound_s)))
        results = {"ms": 1e3 * time_s, "bound direct ms": 1e3 * bound_s, "bound all rails ms": 1e3 * even_s}
        yield CaseResult(case, name, results)


def run(bed: Testbed, policy: Policy, matrices: list[np.ndarray], iterations: int) -> float:
    """Return the median seconds of an iteration; ``matrices[h][i, j]`` are the bytes from i of host h to j."""
    num = bed.layout.num_rails
    with Crew(bed, policy) as crew:
        hosts = [crew.hire(*((host, worker) for worker in range(num))) for host in (0, 1)]
        pairs = [(i, j) for i in range(num) for j in range(num) if any((matrices[0][i, j], matrices[1][j, i]))]
        crew.connect([(hosts[0][i], hosts[1][j]) for i, j in pairs])
        for worker in range(num):
            for host, mine in ((0, [p for p in pairs if p[0] == worker]), (1, [p for p in pairs if p[1] == worker])):
                out = [int(matrices[host][p[host], p[1 - host]]) for p in mine]
                back = [int(matrices[1 - host][p[1 - host], p[host]]) for p in mine]
                place = (crew.board(9), 2 * worker + host, 2 * num)
                hosts[host][worker].begin(roles.exchange, out, back, iterations, *place)
        times = [member.result() for host in hosts for member in host]
    return float(np.median(np.max(times, axis=0)))
