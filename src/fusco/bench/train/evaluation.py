"""What a run is judged by besides its training loss: the loss of text that it does not see, and a sample of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from fusco import fsdp
from fusco.bench.train.job import TrainingJob
from fusco.bench.train.text import Corpus, make_batch

_HELD_OUT_STEP = 999_983  # of the batches that are drawn from held-out text: always the same
_NUM_BATCHES = 4
_TEMPERATURE, _PROMPT_TOKENS = 0.7, 32


@torch.no_grad()
def held_out_loss(model: nn.Module, corpus: Corpus, job: TrainingJob, mesh: fsdp.EPMesh) -> float | None:
    """Return the mean loss over batches of held-out text, the same at every call, of all ranks; a collective."""
    if corpus.held_out is None:
        return None
    total = torch.zeros((), dtype=torch.float64, device=job.device)
    with _evaluating(model):
        for index in range(_NUM_BATCHES):
            batch = make_batch(corpus.held_out, job, dist.get_rank(), _HELD_OUT_STEP + index).to(job.device)
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            total += nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()).double()
    return float(fsdp.global_sum(total, mesh)) / _NUM_BATCHES / job.num_ranks


@torch.no_grad()
def generate(model: nn.Module, corpus: Corpus, job: TrainingJob) -> tuple[str, str]:
    """Return a prompt from held-out text and its continuation by the model; a collective, in which all ranks agree."""
    source = corpus.train if corpus.held_out is None else corpus.held_out
    ids = source[:_PROMPT_TOKENS].long().to(job.device)[None]
    num_prompt = ids.shape[1]
    generator = torch.Generator(job.device).manual_seed(job.seed)
    with _evaluating(model):
        for _ in range(job.sample_tokens):
            logits = model(input_ids=ids[:, -job.length :], use_cache=False).logits[:, -1].float()
            following = torch.multinomial((logits / _TEMPERATURE).softmax(1), 1, generator=generator)
            dist.broadcast(following, 0)  # sums in another order may be enough to choose another one
            ids = torch.cat([ids, following], dim=1)
    return corpus.decode(ids[0, :num_prompt].tolist()), corpus.decode(ids[0, num_prompt:].tolist())


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off."""
    model.eval()
    try:
        yield
    finally:
        model.train()
