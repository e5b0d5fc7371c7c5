"""Functions on ranks: loads of experts, and biases that balance them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_architectures import find_roots, make_root
from fsdp_models import make_batch, make_model, together
from fsdp_runs import Run, dispatcher_of, mesh_of, parallel, step, whole_of
from torch import nn

from fusco import fsdp
from fusco.fsdp.expert_loads import find_expert_biases
from fusco.fsdp.experts import find_experts
from fusco.fsdp.layer import layers_of

NUM_MICROBATCHES = 2
_PAGE = Path(__file__).parents[2] / "docs" / "training" / "runs.md"
_SHAPE_TO_TEXT = {(4,): "(E,)", (1, 4): "(1, E)", (5,): "(E + 1,)", (6,): "(E + zero experts,)"}


def loads_of_a_step(_: dist.ProcessGroup, run: Run) -> list[list[list[int]]]:
    """Return the loads after two microbatches and an evaluation, after a reset, and after one microbatch more."""
    found = []
    with parallel(run) as (model, mesh):
        for index in range(NUM_MICROBATCHES):
            step(run, model, mesh, index)
        with torch.no_grad():
            model(input_ids=make_batch(0, 2).ids)
        for index in (None, 0):
            if index is not None:
                step(run, model, mesh, index)
            found.append([rows.tolist() for rows in fsdp.expert_loads(model).values()])
            fsdp.reset_expert_loads(model)
        found.append([rows.tolist() for rows in fsdp.expert_loads(model).values()])
    return found


def loads_alone(kind: str, nums_sequences: tuple[int, ...], indices: range) -> list[list[int]]:
    """Return the loads in one process, counted before its experts."""
    model = make_model(kind)
    model.set_experts_implementation("eager")
    loads: list[torch.Tensor] = []
    for experts in find_experts(model):
        counts = torch.zeros(experts.num_experts, dtype=torch.int64)
        loads.append(counts)

        def count(_: nn.Module, args: Any, counts: torch.Tensor = counts) -> None:
            counts += args[1].flatten().bincount(minlength=len(counts))

        experts.module.register_forward_pre_hook(count)
    for index in indices:
        model(input_ids=together(nums_sequences, index).ids)
    return [counts.tolist() for counts in loads]


def balanced(_: dist.ProcessGroup, dispatcher: str) -> list[list[int]]:
    """Return the loads with forced balance."""
    run = Run(dispatcher=dispatcher, nums_sequences=(2, 2, 2, 2))
    mesh = mesh_of(2, 1)
    with dispatcher_of(run, mesh) as inner:
        model = make_model("qwen3")
        fsdp.parallelize(model, mesh, fsdp.BalancedDispatcher(inner))
        step(run, model, mesh)
        return [rows.tolist() for rows in fsdp.expert_loads(model).values()]


def train_with_bias(_: dist.ProcessGroup, num_steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """Return the busiest expert's load over the mean's in each step of a DeepSeek-V3 that only its bias changes."""
    busiest, run = [], Run(kind="deepseek-v3")
    with parallel(run) as (model, mesh):
        for _ in range(num_steps):
            step(run, model, mesh)
            (rows,) = fsdp.expert_loads(model).values()
            busiest.append(float(rows.max() / rows.double().mean()))
            fsdp.reset_expert_loads(model)
            fsdp.update_expert_bias(model, 0.02)
        return busiest, [bias.clone() for bias in find_expert_biases(model).values()]


def biases_of_page() -> dict[str, list[str]]:
    """Return the kinds of each row of the page's table, by the row's beginning."""
    rows = re.findall(r"^(\| `[\w.]+` \| (?:buffer|parameter) \| \(.*?\)) \| (.*) \|$", _PAGE.read_text(), re.MULTILINE)
    return {place: kinds.split(", ") for place, kinds in rows}


def update_all_kinds(_: dist.ProcessGroup, kinds: list[str]) -> dict[str, str]:
    """Return, for each kind with a bias, where it is; update it by loads that rise with the expert, and check it."""
    mesh, found = mesh_of(2, 1), {}
    for kind in kinds:
        for root in find_roots(kind):
            try:
                model = make_root(root)
                fsdp.parallelize(model, mesh, fsdp.TorchDispatcher(mesh.ep_group))
            except (ValueError, TypeError, ImportError):
                continue
            try:
                biases = find_expert_biases(model)
            except ValueError:  # nor have the routers of the kind's other classes
                break
            found[kind] = _updated(model, biases)
            break
    return found


def _updated(model: nn.Module, biases: dict[str, torch.Tensor]) -> str:
    before = {name: whole_of(bias) for name, bias in biases.items()}
    for each in layers_of(model).values():
        first = each.dispatcher.group.rank() * each.experts.num_experts // 2
        each.counter.add(1 + first + torch.arange(each.experts.num_experts // 2))
    for _ in range(2):  # the second time without rows since, which changes nothing
        fsdp.update_expert_bias(model, 0.5)
        for name, each in layers_of(model).items():
            if name in biases:
                change, num_experts = whole_of(biases[name]) - before[name], each.experts.num_experts
                expected = torch.zeros_like(change)
                expected[..., : num_experts // 2] = 0.5
                expected[..., num_experts // 2 : num_experts] = -0.5
                torch.testing.assert_close(change, expected)
    name, bias = next(iter(biases.items()))
    (full_name,) = {key for key, value in (*model.named_buffers(), *model.named_parameters()) if value is bias}
    kind = "parameter" if isinstance(bias, nn.Parameter) else "buffer"
    return f"| `{full_name.removeprefix(name.rpartition('.')[0] + '.')}` | {kind} | {_SHAPE_TO_TEXT[tuple(bias.shape)]}"


def errors_of_update(_: dist.ProcessGroup) -> list[str]:
    """Return what is said of models whose bias cannot be updated."""
    mesh, texts = mesh_of(2, 1), []
    for kind, dtype, rate in (("qwen3", torch.float32, 0.1), ("deepseek-v3", torch.bfloat16, 0.1), ("qwen3", None, 0)):
        model = make_model(kind).to(dtype or torch.float32)
        fsdp.parallelize(model, mesh, fsdp.TorchDispatcher(mesh.ep_group))
        with pytest.raises(ValueError) as error:  # noqa: PT011  the text is compared
            fsdp.update_expert_bias(model, rate)
        texts.append(str(error.value))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        fsdp.expert_loads(make_model("qwen3"))
    return [*texts, str(error.value)]
