"""Functions on ranks: measured steps, and optimizers that work on a parallelized model or are named."""

from __future__ import annotations

import contextlib
import importlib
import io
from pathlib import Path

import torch
import torch.distributed as dist
from fsdp_models import SEQUENCE, loss_sum, make_batch, make_model, num_targets
from fsdp_runs import Run, difference, dispatcher_of, mesh_of

from fusco import fsdp
from fusco.fsdp.mesh import local_part


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


def train_by(_: dist.ProcessGroup, name: str) -> tuple[str, float]:
    """Return the error of two steps, if any, and how far the weights are from those in one process."""
    mesh = mesh_of(2, 1)
    model, alone = (make_model("qwen3", num_hidden_layers=1) for _ in range(2))
    fsdp.parallelize(model, mesh, fsdp.TorchDispatcher(mesh.ep_group))
    try:
        ours, reference = make_optimizer(name, model), make_optimizer(name, alone)
        for index in range(2):
            batch = make_batch(0, 2, index)  # the same on all ranks
            for each, optimizer in ((model, ours), (alone, reference)):
                loss = loss_sum(each, batch) / num_targets(batch)
                (loss / dist.get_world_size() if each is model else loss).backward()
                optimizer.step()
                optimizer.zero_grad()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}", 0.0
    expected = dict(alone.named_parameters())
    return "", max(difference(weights, expected[key].detach()) for key, weights in model.named_parameters())


def train_experts_by_muon(_: dist.ProcessGroup, ep_size: int, expert_dim: int) -> dict[str, float] | str:
    """Return how far experts are, in steps, from those that ``torch.optim.Muon`` trained one by one; or the error.

    Gradients are random, of full rank: what rounding adds to those of few tokens, Muon makes as large as the rest.
    """
    mesh, model = mesh_of(ep_size, 1), make_model("qwen3")
    before = {name: each.detach().clone() for name, each in model.named_parameters() if each.ndim == 3}
    fsdp.parallelize(model, mesh, fsdp.TorchDispatcher(mesh.ep_group), fsdp.Sharding(expert_dim=expert_dim))
    stacks = {name: model.get_parameter(name) for name in before}
    try:
        ours = fsdp.ExpertMuon(stacks.values(), lr=1e-2)
    except ValueError as error:
        return str(error)
    matrices = {name: [torch.nn.Parameter(each.clone()) for each in stack] for name, stack in before.items()}
    theirs = torch.optim.Muon([each for part in matrices.values() for each in part], lr=1e-2)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        for name, stack in stacks.items():
            grad = torch.randn(stack.shape, generator=generator)
            stack.grad = torch.zeros_like(stack)
            stack.grad.to_local().copy_(grad[local_part(stack)])
            for each, part in zip(matrices[name], grad, strict=True):
                each.grad = part.clone()
        ours.step()
        theirs.step()
    expected = {name: torch.stack([each.detach() for each in part]) for name, part in matrices.items()}
    return {
        name: float((each.detach().full_tensor() - expected[name]).norm() / (expected[name] - before[name]).norm())
        for name, each in stacks.items()
    }


def make_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of all parameters, Muon of matrices only."""
    parameters = list(model.parameters())
    if name == "Muon":
        parameters = [each for each in parameters if each.ndim == 2]
    kind, _, implementation = name.partition(", ")
    return getattr(torch.optim, kind)(parameters, lr=1e-3, **({implementation: True} if implementation else {}))


def run_lora_snippets(_: dist.ProcessGroup, snippets: list[str], folder: Path) -> None:
    """Run the snippets of the page on LoRA; adapters and merged weights must be those that were trained."""
    run, mesh = Run(), mesh_of(2, 1)
    with dispatcher_of(run, mesh) as dispatcher:
        scope = {name: importlib.import_module(name) for name in ("peft", "torch", "transformers")}
        scope |= {"fsdp": fsdp, "mesh": mesh, "dispatcher": dispatcher, "device": "cpu"}
        scope |= {"loss_sum": loss_sum, "num_targets": num_targets, "batches": [make_batch(dist.get_rank(), 2)] * 2}
        scope |= {name: folder / name for name in ("base", "adapter", "checkpoint", "whole")}
        ids = make_batch(0, 1).ids
        for snippet in snippets:
            exec(snippet, scope)
            if "optimizer" in scope and "trained_logits" not in scope:
                with torch.no_grad():
                    scope["trained_logits"] = scope["model"](input_ids=ids).logits
        with torch.no_grad():
            again, alone, large = (scope[name](input_ids=ids).logits for name in ("again", "alone", "large"))
            plain = make_model("qwen3")(input_ids=ids).logits
        torch.testing.assert_close(again, scope["trained_logits"], rtol=0, atol=1e-5)
        torch.testing.assert_close(alone, scope["trained_logits"], rtol=0, atol=1e-5)
        torch.testing.assert_close(large, plain, rtol=0, atol=1e-5)  # B is zero
        assert (alone - plain).abs().max() > 1e-3


def run_snippets(_: dist.ProcessGroup, snippets: list[str], folder: Path) -> str:
    """Run the snippets of a page, with what a loop has; return what they print."""
    run, mesh = Run(), mesh_of(2, 1)
    with dispatcher_of(run, mesh) as dispatcher:
        model = make_model("qwen3")
        fsdp.parallelize(model, mesh, dispatcher, fsdp.Sharding(expert_dim=0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def train_step() -> torch.Tensor:
            batch = make_batch(dist.get_rank(), 2)
            loss = fsdp.scale_loss(loss_sum(model, batch), num_targets(batch), mesh)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        scope = {"fsdp": fsdp, "torch": torch, "model": model, "mesh": mesh, "optimizer": optimizer}
        scope |= {"train_step": train_step, "generator": torch.Generator(), "folder": folder / "run"}
        scope |= {"csv_file": folder / "metrics.csv"}
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            for snippet in snippets:
                exec(snippet, scope)
        return shown.getvalue()
