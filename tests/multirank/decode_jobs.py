"""Functions on ranks: a decode step whose rows are moved wrongly."""

from __future__ import annotations

from contextlib import ExitStack

import torch
import torch.distributed as dist

from fusco.bench.decode.exchanges import Exchange, Sent, make_exchange
from fusco.bench.decode.job import DecodeJob
from fusco.bench.decode.rank import DecodeBench, DecodeModel
from fusco.bench.decode.records import DecodeRecord


class _Wrong(Exchange):
    """Another exchange, with a mistake on rank 1."""

    def __init__(self, inner: Exchange, rank: int) -> None:
        self._inner, self._is_wrong = inner, rank == 1

    def combine(self, y, sent):
        return self._inner.combine(y, sent)


class _DroppingOne(_Wrong):
    """Gives one token no expert in one place."""

    def dispatch(self, rows, topk_idx, topk_weights):
        if self._is_wrong:
            topk_idx = topk_idx.clone()
            topk_idx[0, 0] = -1
        return self._inner.dispatch(rows, topk_idx, topk_weights)


class _SwappingTwo(_Wrong):
    """Swaps the first rows of two experts."""

    def dispatch(self, rows, topk_idx, topk_weights):
        sent = self._inner.dispatch(rows, topk_idx, topk_weights)
        if not self._is_wrong:
            return sent
        first, second = (int(sent.counts[:expert].sum()) for expert in sent.counts.nonzero()[:2, 0])
        swapped = sent.rows[0].clone()
        swapped[[first, second]] = swapped[[second, first]]
        return Sent((swapped, *sent.rows[1:]), sent.counts, sent.ticket)


class _Flipping(_Wrong):
    """Returns sums in another order."""

    def dispatch(self, rows, topk_idx, topk_weights):
        return self._inner.dispatch(rows, topk_idx, topk_weights)

    def combine(self, y, sent):
        return self._inner.combine(y, sent).flip(0) if self._is_wrong else self._inner.combine(y, sent)


WRONG = {"dropping one": _DroppingOne, "swapping two": _SwappingTwo, "flipping": _Flipping}


@torch.no_grad()
def steps_moved_wrongly(group: dist.ProcessGroup, job: DecodeJob) -> dict[str, DecodeRecord]:
    """Return the records of a variant as it is, and of it with one mistake, by the mistake."""
    bench = DecodeBench(job, group, DecodeModel(job, group.rank()))
    with ExitStack() as stack:
        right = make_exchange("fusco", job, group, stack)
        exchanges = {"none": right, **{name: kind(right, group.rank()) for name, kind in WRONG.items()}}
        return {record.variant: record for record in bench.run(job.cases[-1], exchanges)}
