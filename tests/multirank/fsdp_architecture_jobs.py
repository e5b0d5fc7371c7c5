"""Functions on ranks: gradients of every architecture, against one process with the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import transformers
from fsdp_architectures import make_trained, trained_root
from fsdp_models import Batch, make_batch, num_targets
from fsdp_runs import Run, dispatcher_of, mesh_of
from torch import nn

from fusco import fsdp
from fusco.fsdp.checks import on_all_ranks
from fusco.fsdp.gathered_parts import cut_rows, with_zeros

LIMIT = 5e-6  # of a parameter's largest gradient
NUMS_SEQUENCES = (2, 1, 3, 1)
WAYS = tuple((ep_size, dispatcher) for ep_size in (2, 4) for dispatcher in ("fusco", "torch"))

Grads = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Comparison:
    """An architecture's gradients on four ranks.

    Attributes:
        root: the class of model.
        dtype: ``"float32"``, or ``"float64"`` where one process with a batch in parts is too far from itself.
        noise: how far it is from itself in that dtype, in units of a parameter's largest gradient.
        differences: the largest for each way, as ``"ep 2, fusco"``; the units are the same.

    """

    root: str
    dtype: str
    noise: float
    differences: dict[str, float]


def is_within_limit(differences: Mapping[str, float], noise: float) -> bool:
    """Return whether all differences are within ``LIMIT``, or else twice the noise."""
    return max(differences.values()) <= max(LIMIT, 2 * noise)


def compare(_: dist.ProcessGroup, kind: str, ways: Sequence[tuple[int, str]] = WAYS) -> Comparison | None:
    """Return the comparison on rank 0."""
    transformers.utils.logging.disable_progress_bar()
    root = trained_root(kind)
    alone = _on_first_rank(lambda: _Alone.of(root, torch.float32))
    narrow = [alone is not None and 2 * alone.noise <= LIMIT]
    dist.broadcast_object_list(narrow, src=0)
    dtype = torch.float32 if narrow[0] else torch.float64
    if not narrow[0]:
        alone = _on_first_rank(lambda: _Alone.of(root, dtype))
    grads = [_parallel_grads(root, dtype, Run(ep_size=ep_size, dispatcher=dispatcher)) for ep_size, dispatcher in ways]
    if alone is None:
        return None
    names = [f"ep {ep_size}, {dispatcher}" for ep_size, dispatcher in ways]
    differences = {name: alone.difference(each) for name, each in zip(names, grads, strict=True)}
    return Comparison(root.__name__, str(dtype).removeprefix("torch."), alone.noise, differences)


def _on_first_rank(compute: Callable[[], _Alone]) -> _Alone | None:
    """Return a result on rank 0 and nothing on others; an error is raised on all, so that none waits for it."""
    return on_all_ranks(lambda: None if dist.get_rank() else compute())


def _parallel_grads(root: type[transformers.PreTrainedModel], dtype: torch.dtype, run: Run) -> Grads:
    """Return a model's gradients on four ranks."""
    mesh, batch = mesh_of(run.ep_size, 1), _batches()[dist.get_rank()]
    with dispatcher_of(run, mesh) as dispatcher:
        model = make_trained(root, dtype)
        fsdp.parallelize(model, mesh, dispatcher, fsdp.Sharding(expert_dim=0))
        fsdp.scale_loss(_loss_sum(model, batch), num_targets(batch), mesh).backward()
        grads = {name: each.grad.full_tensor() for name, each in model.named_parameters() if each.grad is not None}
        return grads | {name: with_zeros(grads[name], num_rows) for name, num_rows in cut_rows(model).items()}


@dataclass(frozen=True)
class _Alone:
    """Gradients of one process, with the eager experts of transformers."""

    grads: Grads
    noise: float
    units: dict[str, float]

    @classmethod
    def of(cls, root: type[transformers.PreTrainedModel], dtype: torch.dtype) -> _Alone:
        model, batches = make_trained(root, dtype), _batches()
        model.set_experts_implementation("eager")
        whole = Batch(*(torch.cat([getattr(each, part) for each in batches]) for part in ("ids", "labels")))
        grads, again = _grads(model, [whole]), _grads(model, batches)
        largest = max(float(grad.abs().max()) for grad in grads.values())
        units = {name: float(grad.abs().max()) for name, grad in grads.items()}
        for name, grad in grads.items():
            if float((again[name] - grad).abs().max()) >= 0.01 * units[name]:
                units[name] = largest  # it is zero, or would be but for rounding
        alone = cls(grads, 0.0, units)
        return cls(grads, alone.difference(again), units)

    def difference(self, grads: Grads) -> float:
        """Return the largest difference; what has no gradient here must be zero."""
        unused = max((float(grad.abs().max()) for name, grad in grads.items() if name not in self.grads), default=0.0)
        used = max(float((grads[name] - grad).abs().max()) / self.units[name] for name, grad in self.grads.items())
        return max(unused, used)


def _grads(model: nn.Module, batches: Sequence[Batch]) -> Grads:
    model.zero_grad()
    num_all = sum(map(num_targets, batches))
    for batch in batches:
        (_loss_sum(model, batch) / num_all).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def _batches() -> list[Batch]:
    return [make_batch(rank, num) for rank, num in enumerate(NUMS_SEQUENCES)]


def _loss_sum(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the cross entropy of what a model returns, be it logits of words, of classes, or hidden states."""
    outputs = model(input_ids=batch.ids, use_cache=False)
    scores = outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state
    labels = torch.where(batch.labels < 0, batch.labels, batch.labels % scores.shape[-1])
    return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
