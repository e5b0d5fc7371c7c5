"""Functions on ranks: measured steps, and optimizers that work on a parallelized model or are named."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from fsdp_models import SEQUENCE, loss_sum, make_batch, make_model, num_targets
from fsdp_runs import Run, dispatcher_of, mesh_of

from fusco import fsdp


def measured(_: dist.ProcessGroup, folder: Path) -> list[fsdp.StepMetrics]:
    """Train two steps of two microbatches, measured and written."""
    run, mesh = Run(nums_sequences=(2, 2, 2, 2)), mesh_of(2, 1)
    with dispatcher_of(run, mesh) as inner:
        dispatcher, model = fsdp.TimedDispatcher.on(inner, "cpu"), make_model("qwen3")
        fsdp.parallelize(model, mesh, dispatcher)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        writers = []
        if dist.get_rank() == 0:
            writers = [fsdp.JsonLinesWriter(folder / "m.jsonl"), fsdp.CsvWriter(folder / "m.csv")]
        found = []
        with fsdp.Metrics(
            model, mesh, optimizer=optimizer, dispatcher=dispatcher, peak_flops=1e9, writers=writers
        ) as metrics:
            for _ in range(2):
                loss = 0.0
                for index in range(2):
                    batch = make_batch(dist.get_rank(), 2, index)
                    part = fsdp.scale_loss(loss_sum(model, batch), num_targets(batch), mesh) / 2
                    part.backward()
                    loss += float(part)
                norm = fsdp.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                found.append(metrics.step(loss, 2 * 2 * SEQUENCE, norm))
        return found
