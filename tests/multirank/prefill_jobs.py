"""Functions on ranks: a prefill whose rows are moved wrongly."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import torch
import torch.distributed as dist

from fusco.bench.prefill.job import PrefillJob
from fusco.bench.prefill.model import PrefillModel
from fusco.bench.prefill.rank import PrefillBench
from fusco.bench.prefill.records import PrefillRecord
from fusco.bench.prefill.variants import Variant, make_variants, reference_layers
from fusco.fsdp import Arrival
from fusco.fsdp.layer import ExpertParallelLayer


class _DroppingOne:
    """Gives one token of rank 1 no expert."""

    def __init__(self, inner):
        self.group, self.inner = inner.group, inner

    def dispatch(self, x, topk_idx, topk_weights, num_experts):
        if self.group.rank() == 1:
            topk_idx = topk_idx.index_fill(0, torch.tensor([3]), -1)
        return self.inner.dispatch(x, topk_idx, topk_weights, num_experts)

    def combine(self, y, arrival):
        return self.inner.combine(y, arrival)


class _SwappingTwo(_DroppingOne):
    """Swaps the first two rows of an expert of rank 1."""

    def dispatch(self, x, topk_idx, topk_weights, num_experts):
        sent = self.inner.dispatch(x, topk_idx, topk_weights, num_experts)
        rows = sent.rows.clone()
        if self.group.rank() == 1:
            expert = int((sent.num_rows_per_expert > 1).nonzero()[0])
            first = int(sent.num_rows_per_expert[:expert].sum())
            rows[[first, first + 1]] = rows[[first + 1, first]]
        return Arrival(rows, sent.num_rows_per_expert, sent.ticket)


WRONG = {"dropping one": _DroppingOne, "swapping two": _SwappingTwo}


@torch.no_grad()
def prefill_moved_wrongly(group: dist.ProcessGroup, job: PrefillJob) -> dict[str, PrefillRecord]:
    """Return the records of a variant as it is, and of it with one mistake in one layer, by the mistake."""
    model, found = PrefillModel(job, group.rank()), {}
    reference = reference_layers(group, model.experts)
    with ExitStack() as stack:
        (right,) = make_variants(job, group, model.experts, stack)
        bench = PrefillBench(job, group, model, reference)
        for name, kind in {"none": None, **WRONG}.items():
            layers = list(right.layers)
            if kind is not None:
                layers[0] = ExpertParallelLayer(model.experts[0], kind(right.dispatcher))
            variant: Variant = replace(right, layers=layers)
            (found[name],) = bench.run("1", "trace", [variant])
    return found
