"""Each rank's part of ``fusco train``: train with one dispatcher after the other, and measure every step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from fusco import fsdp
from fusco.bench.harness.json_lines import write_json_lines
from fusco.bench.ranks.progress import ProgressReporter
from fusco.bench.train.balance_loss import balance_loss
from fusco.bench.train.evaluation import generate, held_out_loss
from fusco.bench.train.job import TrainingJob
from fusco.bench.train.model import make_model
from fusco.bench.train.observer import ObservingDispatcher
from fusco.bench.train.records import Run, StepRecord
from fusco.bench.train.saving import Saving, saving_run
from fusco.bench.train.text import Corpus, load_corpus, make_batch, mix_seed
from fusco.core.config import Settings
from fusco.core.stopwatch import SectionTimer
from fusco.fsdp.metric_writers import open_writer

_MAX_GRAD_NORM = 1.0


def train_and_log(
    group: dist.ProcessGroup,
    job: TrainingJob,
    saving: Saving | None,
    keeps_routing: bool,  # noqa: FBT001  passed by position
    log: Path | None,
    progress_port: int | None,
) -> list[Run]:
    """Train one rank's part of a job, as ``train_rank``; rank 0 appends each step to ``log`` and reports it."""
    progress = ProgressReporter(group.rank(), progress_port, job.num_steps * len(job.dispatchers))

    def on_step(step: StepRecord) -> None:
        write_json_lines([step], None if group.rank() else log, appends=True)
        progress.advance(step.describe())

    return train_rank(job, on_step, saving=saving, keeps_routing=keeps_routing)


def train_rank(
    job: TrainingJob,
    report: Callable[[StepRecord], None],
    *,
    saving: Saving | None = None,
    keeps_routing: bool = False,
) -> list[Run]:
    """Train one rank's part of a job; a collective of all ranks of the default group.

    ``report`` is called after every step; ``keeps_routing`` gathers the routing of the last step on rank 0. Returns one
    run for each dispatcher. Steps are the same on all ranks; the other fields are those of rank 0.
    """
    corpus, mesh = load_corpus(job), fsdp.build_mesh(job.ep_size, device_type=job.device)
    runs = []
    for name in job.dispatchers:
        with _dispatcher(name, job, mesh) as chosen:
            inner = fsdp.BalancedDispatcher(chosen) if job.forces_balance else chosen
            observer = ObservingDispatcher(inner, SectionTimer(job.device), job.shape.num_layers, keeps_routing)
            runs.append(_run(job, name, mesh, observer, corpus, report, saving))
        gc.collect()  # modules and their hooks are cycles, and the next run needs their memory
        if job.device == "cuda":
            torch.cuda.empty_cache()
    return runs


@contextmanager
def _dispatcher(name: str, job: TrainingJob, mesh: fsdp.EPMesh) -> Iterator[fsdp.Dispatcher]:
    if name == "torch":
        yield fsdp.TorchDispatcher(mesh.ep_group)
    else:
        settings = Settings(timeout_s=job.timeout_s)
        with fsdp.FuscoDispatcher(mesh.ep_group, job.tokens, settings=settings) as dispatcher:
            yield dispatcher


def _run(
    job: TrainingJob,
    name: str,
    mesh: fsdp.EPMesh,
    observer: ObservingDispatcher,
    corpus: Corpus,
    report: Callable[[StepRecord], None],
    saving: Saving | None,
) -> Run:
    if job.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = make_model(job, mesh, observer).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate)
    warmup = LambdaLR(optimizer, lambda index: min(1.0, (index + 1) / max(1, job.warmup_steps)))
    observer.num_layers = len(fsdp.expert_loads(model))
    writers = [open_writer(target) for target in job.metrics] if dist.get_rank() == 0 else []
    torch.manual_seed(mix_seed(job.seed, dist.get_rank()))  # of dropout
    steps = []
    with (
        fsdp.Metrics(model, mesh, optimizer=optimizer, dispatcher=observer, writers=writers) as metrics,
        saving_run(saving, fsdp.RunState(model=model, optimizer=optimizer, scheduler=warmup)) as saver,
    ):
        for index in range(saver.load(), job.num_steps):
            batch = make_batch(corpus.train, job, dist.get_rank(), index).to(job.device)
            observer.topk_idx.clear()
            _barrier()
            metrics.start(index)
            loss, router_loss = _losses(job, model, batch, mesh)
            (loss + router_loss).backward()  # type: ignore[no-untyped-call]
            norm = fsdp.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
            observer.synchronize()  # raises if rows did not arrive, before their gradients are used
            optimizer.step()
            if job.balance_rate:
                fsdp.update_expert_bias(model, job.balance_rate)
            warmup.step()
            optimizer.zero_grad()
            measured = metrics.step(loss, job.tokens, norm)  # waits until the device has finished the step
            is_due = (index + 1) % job.eval_every == 0 or index + 1 == job.num_steps
            held_out = held_out_loss(model, corpus, job, mesh) if is_due else None
            steps.append(StepRecord.of(name, measured, held_out))
            report(steps[-1])
            saver.save_if_due(index + 1, job.num_steps)
    sample = generate(model, corpus, job) if job.sample_tokens else None
    if job.export:
        fsdp.save_hugging_face(job.export, model)
    return Run(
        steps=steps,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        peak_memory_bytes=torch.cuda.max_memory_allocated() if job.device == "cuda" else 0,
        routing=_gather_routing(job, observer) if observer.keeps_routing else None,
        sample=sample,
    )


def _barrier() -> None:
    """Wait for all ranks on the host, so that no rank is timed while another still reports the previous step."""
    dist.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"))


def _losses(
    job: TrainingJob, model: nn.Module, batch: torch.Tensor, mesh: fsdp.EPMesh
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return this rank's part of the mean loss and of the router loss, in which all ranks have equal weight."""
    has_router_loss = job.router_loss > 0
    more = {"output_router_logits": True} if has_router_loss else {}
    out = model(input_ids=batch[:, :-1], use_cache=False, **more)
    targets = batch[:, 1:].flatten()
    loss_sum = nn.functional.cross_entropy(out.logits.flatten(0, 1).float(), targets, reduction="sum")
    loss = fsdp.scale_loss(loss_sum, targets.numel(), mesh)
    if not has_router_loss:
        return loss, 0.0
    return loss, job.router_loss / job.num_ranks * balance_loss(out.router_logits, job.shape.num_topk)


def _gather_routing(job: TrainingJob, observer: ObservingDispatcher) -> np.ndarray | None:
    """Return the last step's expert ids of all ranks on rank 0; a collective."""
    local = torch.stack([ids.view(job.tokens, job.shape.num_topk) for ids in observer.topk_idx], dim=1).int().cpu()
    parts = [torch.empty_like(local) for _ in range(job.num_ranks)] if dist.get_rank() == 0 else None
    dist.gather(local, parts)
    return torch.cat(parts).numpy() if parts else None
