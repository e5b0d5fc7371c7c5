"""One record for each workload and variant, as it is printed and written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fusco.bench.harness.environment import VerifiedMeasurement
from fusco.bench.shuffle.variants import DEDUPLICATED, has_fixed_messages


@dataclass(frozen=True, kw_only=True)
class VariantRecord(VerifiedMeasurement):
    """Fields of every line: the variant, the workload, the environment. ``trace_repeats`` is 0 without a trace.

    Several records have the same traffic if it is of batches of a prefill: ``batch`` is their number. Their ``tokens``
    are the most of a rank, ``all_tokens`` those of all ranks.
    """

    variant: str
    traffic: str
    nodes: int
    ranks_per_node: int
    batch: int
    tokens: int
    all_tokens: int
    hidden: int
    num_experts: int
    num_topk: int
    dtype: str
    device: str
    num_iterations: int
    trace: str
    trace_repeats: float


@dataclass(frozen=True, kw_only=True)
class InternodeBytesRecord(VariantRecord):
    """A variant's line with what it sent between nodes.

    Bytes are sums over all ranks of one dispatch, unless they say combine. ``internode_row_bytes_lower_bound`` is the
    distinct (token, remote node) pairs times the size of a row. ``busiest_rank_bytes`` is the maximum that any rank
    sends or any rank receives, in a dispatch as in a combine.
    """

    balancer: str
    internode_row_bytes: int
    combine_internode_row_bytes: int
    internode_row_bytes_lower_bound: int
    metadata_bytes: int
    busiest_rank_bytes: int
    internode_peak_gbs: float

    @property
    def is_right(self) -> bool:
        """Verified, and a variant that sends one copy for each node sends no unneeded row."""
        sent = {self.internode_row_bytes, self.combine_internode_row_bytes}
        may_send_more = self.variant not in DEDUPLICATED or has_fixed_messages(self.variant, self.device)
        is_minimal = may_send_more or sent == {self.internode_row_bytes_lower_bound}
        return self.verified and is_minimal


@dataclass(frozen=True, kw_only=True)
class ShuffleRecord(InternodeBytesRecord):
    """One variant's line on the CPU. Times in milliseconds: medians over iterations of the slowest rank's.

    ``total_ms`` is the slowest rank's dispatch plus the slowest rank's combine, which may be another rank: between them
    all ranks wait for each other. ``wire_ms`` includes what is fused into the transfer; planning, staging, wire and
    rearranging are each the slowest rank's, of dispatch and combine together, so they need not add up to ``total_ms``.
    On a testbed, ``bound_ms`` is the time of ``busiest_rank_bytes`` at the rate of a rank's rails; elsewhere 0.
    ``other_cores_share`` is the share of the cores' time that other processes took meanwhile. It is known where one
    machine has all ranks, on a testbed; elsewhere it is 0.
    """

    dispatch_ms: float
    combine_ms: float
    bound_ms: float
    other_cores_share: float
    total_ms: float
    planning_ms: float
    staging_ms: float
    wire_ms: float
    rearranging_ms: float
    intranode_row_bytes: int
    lane_row_bytes: int
    copy_peak_gbs: float


@dataclass(frozen=True, kw_only=True)
class DeviceRecord(VariantRecord):
    """One variant's line, within a node. Times in milliseconds: medians of the slowest rank's, see ``DeviceTimes``.

    ``None`` means that the variant was not timed. ``remote_row_bytes`` is the maximum over ranks of the rows that a
    rank must receive from others, each row once; ``dispatch_gbs`` and ``combine_gbs`` are those bytes over the time,
    and the ``_of_peak`` fractions compare them with the copy engine (pulling for dispatch, pushing for combine).
    """

    dispatch_ms: float | None
    combine_ms: float | None
    total_ms: float | None
    loop_ms: float | None
    idle_ms: float | None
    remote_row_bytes: int
    dispatch_gbs: float | None
    combine_gbs: float | None
    dispatch_of_peak: float | None
    combine_of_peak: float | None
    num_sms: dict[str, int]
    kernel_us: dict[str, float]
    peaks: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class InternodeRecord(InternodeBytesRecord):
    """One variant's line, between nodes. Times in milliseconds: medians of the slowest rank's, see ``DeviceTimes``.

    ``empty_bytes`` are those of rows without a token, which are not among ``internode_row_bytes``. ``bound_ms`` is the
    time of ``busiest_rank_bytes`` at ``internode_peak_gbs``, and the ``_over_bound`` ratios are
    the times over it: 1 means that the network of the busiest rank was never idle. ``emulation`` says which variables
    the benchmark set so that nodes of one machine communicate over the network only; empty on a cluster.
    """

    dispatch_ms: float
    combine_ms: float
    total_ms: float
    loop_ms: float
    idle_ms: float
    empty_bytes: int
    bound_ms: float
    dispatch_over_bound: float | None
    combine_over_bound: float | None
    combine_metadata_bytes: int
    num_sms: dict[str, int]
    peaks: dict[str, float]
    emulation: str


@dataclass(frozen=True)
class Gain:
    """Ratio of a variant to the first one, in the same batches: of the time and of the busiest rank's rows."""

    variant: str
    median: float
    p99: float
    rows_median: float
    rows_p99: float


def gains_of(records: Sequence[ShuffleRecord]) -> list[Gain]:
    """Return the gain over each other variant; ``records`` have the same variants in each batch."""
    times: dict[str, list[float]] = {}
    rows: dict[str, list[float]] = {}
    for record in records:
        times.setdefault(record.variant, []).append(record.total_ms)
        rows.setdefault(record.variant, []).append(record.busiest_rank_bytes)
    first, *others = times
    gains = []
    for name in others:
        ratios = [np.divide(of[name], of[first]) for of in (times, rows)]
        figures = [float(figure) for ratio in ratios for figure in (np.median(ratio), np.quantile(ratio, 0.99))]
        gains.append(Gain(name, *figures))
    return gains
