"""Train MoE layers of Megatron-core by its all-to-all and by HybridEP's interface on fusco: losses and times compared.

``python tools/megatron_steps.py [--device cuda] [--json FILE]``, on two processes. Both runs have the same weights and
tokens. A layer's time is that from the end of its router until its experts begin, and from their end until its output:
its permutations and exchanges. Exit code 1 if losses or gradients differ by more than bfloat16's noise.
"""

# ruff: noqa: PLC0415  megatron-core need not be installed

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fusco
from fusco.bench.harness.environment import Measurement, hardware, versions
from fusco.bench.harness.json_lines import write_json_lines
from fusco.bench.prefill.variants import relative_error
from fusco.bench.ranks.emulation import emulated_network
from fusco.bench.ranks.local_world import LocalWorld
from fusco.core.stopwatch import Stopwatch
from fusco.core.topology import Topology
from without_cuda import without_cuda

BACKENDS = {
    "alltoall": {"moe_token_dispatcher_type": "alltoall"},
    "hybridep": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
}
_LOSS_LIMIT = 0.02  # nats, of any step: weights are rounded to 8 bits in each
_NORM_LIMIT = 0.01  # of the gradients of a rank's experts in the first step, relative
# Of what the first layer of the first step adds to a token, relative to its norm. In later layers a rounding may change
# which experts a token has, and with them its sum by a quarter.
_OUTPUT_LIMIT = 0.03
_LEARNING_RATE = 2e-4  # the loss falls over a dozen steps
_NUM_WARM_UPS = 3
_VOCAB = 512


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model, and the steps."""

    layers: int = 4
    hidden: int = 2048
    inner: int = 768
    num_experts: int = 64
    num_topk: int = 8
    tokens: int = 4096
    steps: int = 20


SMALL = Shape(layers=2, hidden=64, inner=64, num_experts=8, num_topk=2, tokens=64, steps=6)


@dataclass(frozen=True, kw_only=True)
class StepsRecord(Measurement):
    """Both runs; times are medians of the slowest rank, differences the largest."""

    kind: str = "megatron"
    losses: dict[str, list[float]]  # of each step, by backend
    max_loss_difference: float
    max_norm_difference: float
    max_output_difference: float
    verified: bool
    alltoall_layer_ms: float
    alltoall_step_ms: float
    hybridep_layer_ms: float
    hybridep_step_ms: float
    shape: Shape


@dataclass
class Clock:
    """Times of the layers' sections, by marks that modules' hooks make."""

    watch: Stopwatch
    marks: list[Any] = field(default_factory=list)

    def watch_layer(self, layer: nn.Module) -> None:
        """Mark the end of the router, the experts' beginning and end, and the end of the layer."""
        for module, register in (
            (layer.router, "register_forward_hook"),
            (layer.experts, "register_forward_pre_hook"),
            (layer.experts, "register_forward_hook"),
            (layer, "register_forward_hook"),
        ):
            getattr(module, register)(lambda *_: self.marks.append(self.watch.mark()))

    def take_ms(self) -> float:
        """Return the milliseconds of a layer since the last call, mean over layers; the device must be idle."""
        fours = [self.marks[first : first + 4] for first in range(0, len(self.marks), 4)]
        self.marks.clear()
        return mean(
            self.watch.elapsed_ms(routed, begun) + self.watch.elapsed_ms(ended, out)
            for routed, begun, ended, out in fours
        )


def train(group: dist.ProcessGroup, device: str, shape: Shape) -> dict[str, dict[str, Any]]:
    """Train by each backend; return losses and times of this rank's layers."""
    sys.path.insert(0, str(Path(fusco.__file__).parent / "integrations" / "path"))
    found, weights = {}, None
    with contextlib.ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(without_cuda())
        for backend in BACKENDS:
            model, clock = _model(group, backend, device, shape), Clock(Stopwatch(device))
            weights = weights or {
                name: value.clone() for name, value in model.state_dict().items() if value is not None
            }
            model.load_state_dict(weights, strict=False)
            for layer in list(model)[1:-1]:
                clock.watch_layer(layer)
            found[backend] = _steps(model, clock, group, device, shape)
    return found


def _steps(model: nn.Sequential, clock: Clock, group: dist.ProcessGroup, device: str, shape: Shape) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    shared = [each for each in model.parameters() if getattr(each, "allreduce", True)]
    own = [each for each in model.parameters() if not getattr(each, "allreduce", True)]
    losses, layer_ms, step_ms, norm, added = [], [], [], 0.0, torch.empty(0)
    for step in range(shape.steps):
        random = torch.Generator().manual_seed(1000 * step + group.rank())
        ids = torch.randint(_VOCAB, (shape.tokens, 1), generator=random).to(device)
        dist.all_reduce(torch.zeros(1, device="cpu"), group=group)
        start = clock.watch.mark()
        rows = model[0](ids)
        for index, layer in enumerate(list(model)[1:-1]):
            more = layer(nn.functional.rms_norm(rows, rows.shape[-1:]))[0]
            if step == index == 0:
                added = more.detach().flatten(0, 1).float().cpu()
            rows = rows + more
        logits = model[-1](nn.functional.rms_norm(rows, rows.shape[-1:]))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), (7 * ids.flatten() + 3) % _VOCAB)
        loss.backward()  # type: ignore[no-untyped-call]
        if step == 0:
            norm = float(torch.stack([each.grad.float().norm() for each in own if each.grad is not None]).norm())
        for each in shared:
            if each.grad is not None:
                dist.all_reduce(each.grad, group=group)
                each.grad /= group.size()
        optimizer.step()
        optimizer.zero_grad()
        end, whole = clock.watch.mark(), loss.detach().float().cpu()  # the host waits here
        dist.all_reduce(whole, group=group)
        losses.append(float(whole) / group.size())
        if device == "cuda":
            torch.cuda.synchronize()
        layer_ms.append(clock.take_ms())
        step_ms.append(clock.watch.elapsed_ms(start, end))
    return {
        "losses": losses,
        "norm": norm,
        "added": added,
        "layer_ms": layer_ms[_NUM_WARM_UPS:],
        "step_ms": step_ms[_NUM_WARM_UPS:],
    }


def _model(group: dist.ProcessGroup, backend: str, device: str, shape: Shape) -> nn.Sequential:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    do_without_transformer_engine()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=group.size())
    dtype = torch.bfloat16
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=4,
        num_moe_experts=shape.num_experts,
        moe_router_topk=shape.num_topk,
        moe_ffn_hidden_size=shape.inner,
        add_bias_linear=False,
        expert_model_parallel_size=group.size(),
        moe_router_dtype="fp32",
        use_cpu_initialization=True,
        moe_router_load_balancing_type="none",
        params_dtype=dtype,
        bf16=True,
        gradient_accumulation_fusion=False,
        moe_router_pre_softmax=True,
        init_method_std=shape.hidden**-0.5,  # so that experts weigh as much as the rows that they are added to
        **BACKENDS[backend],
    )
    torch.manual_seed(5)
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    submodules = MoESubmodules(experts=ModuleSpec(module=SequentialMLP, submodules=linear))
    layers = [MoELayer(config, submodules, layer_number=1 + index) for index in range(shape.layers)]
    embedding, head = nn.Embedding(_VOCAB, shape.hidden), nn.Linear(shape.hidden, _VOCAB, bias=False)
    return nn.Sequential(embedding.to(dtype), *layers, head.to(dtype)).to(device).train()


def do_without_transformer_engine() -> None:
    """Define what Megatron-core 0.16 forgets to define without TransformerEngine.

    Configurations with FP8 require a version of it, even where nothing of it runs.
    """
    from megatron.core import utils
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if utils.get_te_version() in (None, utils.PkgVersion("0.0.0")):
        utils._te_version = utils.PkgVersion("1.7.0")  # noqa: SLF001


def main() -> int:
    """Train by both backends on two ranks, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    shape = Shape() if chosen.device == "cuda" else SMALL
    gpus = torch.cuda.device_count() if chosen.device == "cuda" else 0
    hosts = emulated_network(Topology.of_equal_nodes(2, 2), os.environ, gpus)
    with LocalWorld(2, chosen.device, environment=hosts) as world:
        ranks = world.run(train, 2, chosen.device, shape)
    losses = {backend: ranks[0][backend]["losses"] for backend in BACKENDS}
    apart = max(abs(one - other) for one, other in zip(*losses.values(), strict=True))
    norms = [[rank[backend]["norm"] for backend in BACKENDS] for rank in ranks]
    norms_apart = max(abs(ours / theirs - 1) for theirs, ours in norms)
    errors = [relative_error(*(rank[backend]["added"] for backend in BACKENDS)) for rank in ranks]
    outputs_apart = float(torch.cat(errors).max())
    is_verified = apart <= _LOSS_LIMIT and norms_apart <= _NORM_LIMIT and outputs_apart <= _OUTPUT_LIMIT
    ms = {
        f"{backend}_{what}": round(max(median(rank[backend][what]) for rank in ranks), 3)
        for backend in BACKENDS
        for what in ("layer_ms", "step_ms")
    }
    record = StepsRecord(
        losses=losses,
        max_loss_difference=apart,
        max_norm_difference=norms_apart,
        max_output_difference=outputs_apart,
        verified=is_verified,
        **ms,
        shape=shape,
        versions=versions("megatron-core"),
        hardware=hardware(chosen.device),
    )
    write_json_lines([record], chosen.json)
    sys.stdout.write(
        f"losses of {shape.steps} steps: {losses['alltoall'][0]:.4f} to {losses['alltoall'][-1]:.4f}, at most "
        f"{apart:.5f} nats apart (limit {_LOSS_LIMIT})\nin the first step, losses' gradients of experts "
        f"{norms_apart:.2%} apart (limit {_NORM_LIMIT:.0%}), outputs of the first layer {outputs_apart:.2%} "
        f"({_OUTPUT_LIMIT:.0%})\n"
    )
    for what in ("layer_ms", "step_ms"):
        times = [ms[f"{backend}_{what}"] for backend in BACKENDS]
        sys.stdout.write(f"{what}: alltoall {times[0]}, hybridep on fusco {times[1]}: {times[0] / times[1]:.2f} x\n")
    return int(not is_verified)


if __name__ == "__main__":
    sys.exit(main())
