"""Modules of experts, found by their structure and not by their names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fusco.fsdp.dispatcher import ExpertCopies
from fusco.fsdp.expert_adapters import ExpertAdapter, find_expert_adapters
from fusco.fsdp.grouped_linear import grouped_linear, sizes_for
from fusco.fsdp.mesh import local_values

_UP_NAMES, _DOWN_NAME = ("gate_up_proj", "up_proj"), "down_proj"


@dataclass(frozen=True, eq=False)
class Experts:
    """A module with all experts of a layer, as transformers 5 stores them.

    Attributes:
        name: of the module in its model.
        module: has the parameters ``gate_up_proj`` (or ``up_proj``, without a gate) and ``down_proj``, of three
            dimensions, and optionally ``gate_up_proj_bias`` and ``down_proj_bias``, of two; dimension 0 is the expert.
            It is called with (hidden_states, top_k_index, top_k_weights).
        num_experts: of all ranks, without zero experts.
        up_name: ``"gate_up_proj"`` or ``"up_proj"``.
        is_transposed: whether matrices are stored as (num_inputs, num_outputs).
        adapters: LoRA of peft on the projections.
        scaling_block: the block that scales rows by the router's scores (``ScaledInputs``); then the original module
            takes such rows, and no routing.
        num_zero_experts: experts without weights, with the last ids, which return their rows (LongCat-Flash).
    """

    name: str
    module: nn.Module
    num_experts: int
    up_name: str
    is_transposed: bool
    adapters: list[ExpertAdapter] = field(default_factory=list)
    scaling_block: nn.Module | None = None
    num_zero_experts: int = 0

    def run(
        self,
        rows: torch.Tensor,
        num_rows_per_expert: torch.Tensor,
        copies: ExpertCopies | None = None,
        num_rows_on_host: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Apply this rank's experts to expert-major rows (num_rows, hidden).

        The blocks of ``copies``, other ranks' experts, follow; without them only the first blocks, those of this rank's
        experts, have rows. ``num_rows_on_host`` is ``num_rows_per_expert``, which the host otherwise waits for if there
        are copies.
        """
        weights = self.weights()
        num_local = len(weights[_DOWN_NAME])
        at_home = num_rows_per_expert[:num_local]
        if not (copies and copies.weights):
            return self._run(weights, rows, at_home)
        # Two products, as joining the weights would copy all of them; copies may arrive during the first.
        known = num_rows_per_expert.tolist() if num_rows_on_host is None else num_rows_on_host.tolist()
        num_rows = sum(known[:num_local])
        if torch.is_grad_enabled():  # copies without rows have gradients, too, as all ranks exchange these
            out = self._run(weights, rows[:num_rows], at_home)
            return torch.cat([out, self._run(copies.wait(), rows[num_rows:], num_rows_per_expert[num_local:])])
        out = self._run(weights, rows, at_home)  # of all rows, so that results of copies have a place
        copied = copies.wait()
        if any(known[num_local:]):
            out[num_rows:] = self._run(copied, rows[num_rows:], num_rows_per_expert[num_local:])
        return out

    def _run(
        self, weights: Mapping[str, torch.Tensor], rows: torch.Tensor, num_rows_per_expert: torch.Tensor
    ) -> torch.Tensor:
        """Apply the experts with these weights to expert-major rows."""
        stacks = [weights[name] for name in (self.up_name, _DOWN_NAME)]
        if not self.is_transposed:
            stacks = [stack.transpose(1, 2) for stack in stacks]
        sizes = sizes_for(rows, stacks, num_rows_per_expert)

        def project(name: str, stack: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
            out = grouped_linear(inputs, stack, weights.get(f"{name}_bias"), num_rows_per_expert, sizes)
            for adapter in self.adapters:
                if adapter.parameter == name:
                    out = adapter.add_products(out, inputs, weights, num_rows_per_expert, sizes)
            return out

        hidden = self._activation(project(self.up_name, stacks[0], rows))
        return project(_DOWN_NAME, stacks[1], hidden)

    def describe(self) -> str:
        """Return the formula that ``run`` computes for a row."""
        if self.up_name == "up_proj":
            return f"{_DOWN_NAME}(act_fn(up_proj(row)))"
        if hasattr(self.module, "_apply_gate"):
            return f"{_DOWN_NAME}(_apply_gate({self.up_name}(row)))"
        return f"{_DOWN_NAME}(act_fn(gate) * up), gate and up being the halves of {self.up_name}(row)"

    def local(self, name: str) -> torch.Tensor:
        """Return a parameter's values for this rank's experts; gradients flow to the parameter."""
        return local_values(getattr(self.module, name))

    def weights(self) -> dict[str, torch.Tensor]:
        """Return all parameters of this rank's experts, and of their adapters, (num_local_experts, ...), by name."""
        weights = {name: self.local(name) for name, _ in self.module.named_parameters(recurse=False)}
        if self.num_zero_experts:
            weights[self.up_name] = weights[self.up_name][: len(weights[_DOWN_NAME])]
        dtype = weights[_DOWN_NAME].dtype
        return weights | {key: each for adapter in self.adapters for key, each in adapter.weights(dtype).items()}

    def _activation(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.up_name == "up_proj":
            return self._call("act_fn", hidden)
        if hasattr(self.module, "_apply_gate"):
            return self._call("_apply_gate", hidden)  # transformers' hook for a model-specific gate
        gate, up = hidden.chunk(2, dim=-1)
        return self._call("act_fn", gate) * up

    def _call(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = getattr(self.module, name)(hidden)
        return result


def find_experts(model: nn.Module) -> list[Experts]:
    """Return all modules of experts of a model: those with the 3-D parameters and the inputs of ``Experts.module``.

    Raises:
        ValueError: if there is none, with all modules that look like experts and why they do not qualify; for one with
            additional parameters, and for one whose parameters a parametrization, or another adapter than LoRA of peft
            on a projection, changes.
    """
    found, candidates = [], []
    for name, module in model.named_modules():
        block = None if _takes_routing(module) else scaling_block(name, module, model)
        obstacle = _obstacle(module, is_called_with_routing=block is None)
        if not obstacle:
            wrappers = find_expert_adapters(name, module, model)
            stacks = dict(module.named_parameters(recurse=False))
            experts = _experts_of(name, module, next(key for key in _UP_NAMES if key in stacks))
            if wrappers and experts.num_zero_experts:
                raise ValueError(f"{name} has zero experts: adapters on it are not supported")
            adapters = [ExpertAdapter(wrapper, module, 0, experts.num_experts) for wrapper in wrappers]
            found.append(replace(experts, adapters=adapters, scaling_block=block))
        elif looks_like_experts(name, module):
            candidates.append(Candidate(name, module, obstacle))
        _check_unparametrized(name, module)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no module of experts: one with the parameters gate_up_proj (or up_proj) and "
            f"down_proj of shape (num_experts, ..., ...), as the MoE models of transformers 5 have"
            f"{describe_candidates(candidates)}"
        )
    return found


def _obstacle(module: nn.Module, *, is_called_with_routing: bool) -> str:
    """Return the reason why a module is not a module of experts; empty if it is one."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return "each expert is a module by itself"
    stacks = {key: parameter for key, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3}
    if not stacks:
        return "no parameter has three dimensions, the first of them the expert"
    up_name = next((key for key in _UP_NAMES if key in stacks), None)
    if up_name is None or set(stacks) != {up_name, _DOWN_NAME}:
        return f"the parameters of three dimensions are {', '.join(sorted(stacks))}"
    if len(stacks[up_name]) < len(stacks[_DOWN_NAME]):
        return f"{up_name} is of {len(stacks[up_name])} experts and {_DOWN_NAME} of {len(stacks[_DOWN_NAME])}"
    if is_called_with_routing and not _takes_routing(module):
        inputs = ", ".join(inspect.signature(module.forward).parameters)
        return f"it is called with ({inputs}) and not with (hidden_states, top_k_index, top_k_weights)"
    return ""


def _check_unparametrized(name: str, module: nn.Module) -> None:
    """Raise for experts with computed parameters, which ``find_experts`` would otherwise skip silently."""
    changed = getattr(module, "parametrizations", {}) if is_parametrized(module) else {}
    if any(key in changed for key in _UP_NAMES) and _takes_routing(module):
        raise ValueError(
            f"{name} ({type(module).__name__}) has parametrizations of {', '.join(changed)}: fusco distributes experts "
            f"whose parameters are plain, so remove them first (torch.nn.utils.parametrize.remove_parametrizations)"
        )


def _takes_routing(module: nn.Module) -> bool:
    """Return whether the module can be called with (hidden_states, top_k_index, top_k_weights)."""
    try:
        inspect.signature(module.forward).bind("hidden_states", "top_k_index", "top_k_weights")
    except TypeError:
        return False
    return True


def _experts_of(name: str, module: nn.Module, up_name: str) -> Experts:
    stacks = dict(module.named_parameters(recurse=False))
    num_experts = len(stacks[_DOWN_NAME])
    num_zero_experts = len(stacks[up_name]) - num_experts
    known = {up_name, _DOWN_NAME, f"{up_name}_bias", f"{_DOWN_NAME}_bias"}
    for key, parameter in module.named_parameters():
        if key not in known or len(parameter) != num_experts + (num_zero_experts if key == up_name else 0):
            raise ValueError(
                f"{name}.{key} of shape {tuple(parameter.shape)} cannot be distributed with the {num_experts} experts "
                f"of its module: only weights and biases of the projections can"
            )
    is_transposed = _is_transposed(name, module, stacks[up_name], stacks[_DOWN_NAME])
    return Experts(name, module, num_experts, up_name, is_transposed, num_zero_experts=num_zero_experts)


def _is_transposed(name: str, module: nn.Module, up: nn.Parameter, down: nn.Parameter) -> bool:
    """Return the module's ``is_transposed`` (set by transformers), or else what the shapes allow."""
    plain, transposed = up.shape[2] == down.shape[1], up.shape[1] == down.shape[2]
    declared = getattr(module, "is_transposed", not plain)
    if not (transposed if declared else plain):
        raise ValueError(
            f"{name}: the shapes of its projections, {tuple(up.shape)} and {tuple(down.shape)}, do not match"
        )
    return bool(declared)


_MAX_SHOWN = 6


@dataclass(frozen=True, eq=False)
class Candidate:
    """A module that looks like experts."""

    name: str  # of the module in its model
    module: nn.Module  # the module
    obstacle: str  # the reason why it cannot be distributed

    def describe(self) -> str:
        """Return the candidate's class, parameters and obstacle, without its name."""
        if isinstance(self.module, (nn.ModuleList, nn.ModuleDict)):
            classes = sorted({type(child).__name__ for child in self.module.children()})
            what = f"{type(self.module).__name__} of {len(self.module)} {' and '.join(classes)}"
        else:
            what = type(self.module).__name__
        shapes = [f"{key} {tuple(parameter.shape)}" for key, parameter in self.module.named_parameters(recurse=False)]
        return f"({what}) has {', '.join(shapes) or 'no direct parameters'}: {self.obstacle}"


def looks_like_experts(name: str, module: nn.Module) -> bool:
    """Return whether a module looks like experts: by its name, its class, or a stack of matrices in it.

    A module counts only if it has direct parameters or is a list of modules; a wrapper around one does not.
    """
    shapes = [parameter.shape for parameter in module.parameters(recurse=False)]
    is_convolution = hasattr(module, "kernel_size")
    if any(len(shape) == 3 and shape[0] > 1 for shape in shapes) and not is_convolution:
        return True
    is_named_so = "expert" in name.rpartition(".")[2].lower() or "expert" in type(module).__name__.lower()
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module) > 1
    return is_named_so and (bool(shapes) or is_list)


def describe_candidates(candidates: Iterable[Candidate]) -> str:
    """Return all candidates, each kind once, as text to append to an error; empty if there is none."""
    text_to_names: dict[str, list[str]] = {}
    for candidate in candidates:
        text_to_names.setdefault(candidate.describe(), []).append(candidate.name or "the model itself")
    texts = [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} {text}"
        for text, names in text_to_names.items()
    ]
    left_out = f"; and {len(texts) - _MAX_SHOWN} kinds more" if len(texts) > _MAX_SHOWN else ""
    return f". What looks like experts: {'; '.join(texts[:_MAX_SHOWN])}{left_out}" if texts else ""


@dataclass(frozen=True, eq=False)
class ScaledInputs:
    """Replaces the ``forward`` of a block with ``router``, ``experts``, ``shared_expert`` and ``top_k``.

    transformers gives every expert all tokens, multiplied by zero where the router has not chosen it. Here a token is a
    row for each expert that it has chosen, so that a rank dispatches ``top_k`` rows per token, with one expert each.
    """

    block: Any

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of all experts, (num_tokens, hidden), and the router's logits, as the original block does."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.block.router(x)
        chosen, expert_idx = scores.topk(self.block.top_k, dim=1)
        rows = (x[:, None] * chosen[..., None]).flatten(0, 1)
        routed = self.block.experts(rows, expert_idx.reshape(-1, 1), torch.ones_like(rows[:, :1]))
        return self.block.shared_expert(x) + routed.unflatten(0, chosen.shape).sum(1), logits


def scaling_block(name: str, experts: nn.Module, model: nn.Module) -> nn.Module | None:
    """Return the block around a module of experts, by name in its model, if its parts are those of ``ScaledInputs``."""
    parent_name, _, key = name.rpartition(".")
    parent = model.get_submodule(parent_name) if key == "experts" else model
    is_block = {key for key, _ in parent.named_children()} == {"experts", "router", "shared_expert"}
    return parent if is_block and hasattr(parent, "top_k") and parent.experts is experts else None
