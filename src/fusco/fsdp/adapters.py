"""Adapters of peft on a model: which weights are the plain model's, and merging into sharded weights."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from fusco.fsdp.expert_adapters import ExpertAdapter, find_expert_adapters
from fusco.fsdp.layer import layer_of
from fusco.fsdp.mesh import local_part, local_values
from fusco.fsdp.wrapping import is_whole_copy

# Values of LoraConfig.init_lora_weights (peft 0.21) with which adapters do not depend on the weights below them.
_INDEPENDENT = (True, False, "gaussian", "orthogonal")
_LORA_WEIGHT = re.compile(r"(?P<layer>.*)\.lora_(?P<half>(embedding_)?[AB])\.(?P<adapter>[^.]+)(\.weight|\.bias)?")


def is_adapted(model: nn.Module) -> bool:
    """Return whether a model has adapters, from ``peft.get_peft_model`` or ``model.add_adapter`` of transformers."""
    return isinstance(getattr(model, "peft_config", None), Mapping)


def base_model(model: nn.Module) -> nn.Module:
    """Return the model of transformers within a ``PeftModel``; any other model as it is."""
    get_base_model: Callable[[], nn.Module] | None = getattr(model, "get_base_model", None)
    return get_base_model() if is_adapted(model) and get_base_model else model


def base_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Map the names of weights below adapters, and of their copies that adapters train, to those in the plain model.

    The adapters' own weights are left out. Copies are those that ``modules_to_save`` makes.

    Raises:
        ValueError: for adapters whose values depend on the weights below them.
    """
    if not is_adapted(model):
        return {name: name for name in names}
    for adapter, config in getattr(model, "peft_config").items():  # noqa: B009  not an attribute of every module
        settings = {key: getattr(config, key, None) for key in ("peft_type", "use_dora", "init_lora_weights")}
        if settings["peft_type"] != "LORA" or settings["use_dora"] or settings["init_lora_weights"] not in _INDEPENDENT:
            raise ValueError(
                f"adapter {adapter} ({', '.join(f'{key}={value}' for key, value in settings.items())}) may depend on "
                f"the weights below it: read them before peft wraps the model"
            )
    prefix = next(name for name, module in model.named_modules() if module is base_model(model))
    wrapped = {name for name, module in model.named_modules() if hasattr(module, "base_layer")}
    return {name: _base_name(name, prefix, wrapped) for name in names if not _is_of_adapter(name, wrapped)}


def adapter_names(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Return the names of weights that the files of a model's adapters may have.

    These are those of adapters, the copies that they train, and all outside of blocks: embeddings that were resized are
    in such files, too.
    """
    wrapped = {name for name, module in model.named_modules() if hasattr(module, "base_layer")}
    return {
        name
        for name in names
        if _is_of_adapter(name, wrapped) or ".modules_to_save." in name or not any(map(str.isdigit, name.split(".")))
    }


def _is_of_adapter(name: str, wrapped: set[str]) -> bool:
    parts = name.split(".")
    inside = [length for length in range(1, len(parts)) if ".".join(parts[:length]) in wrapped]
    return any(parts[length] != "base_layer" for length in inside)


def _base_name(name: str, prefix: str, wrapped: set[str]) -> str:
    """Return a name without what peft has put into it: ``original_module`` or ``modules_to_save.<adapter>``, too."""
    parts, kept = name.split("."), []
    skipped = 0
    for idx, part in enumerate(parts):
        if skipped:
            skipped -= 1
        elif part == "modules_to_save":
            skipped = 1
        elif part != "original_module" and not (part == "base_layer" and ".".join(parts[:idx]) in wrapped):
            kept.append(part)
    return ".".join(kept).removeprefix(f"{prefix}.")


@torch.no_grad()
def initialize_adapters(model: nn.Module) -> None:
    """Give LoRA adapters, which have memory but no values yet, those that peft starts from; a collective of all ranks.

    A is random, the same on all ranks, and B is zero (for embeddings the reverse). Warns about adapters that it cannot
    initialise.
    """
    configs: Mapping[str, Any] = getattr(model, "peft_config", {}) if is_adapted(model) else {}
    starts = {adapter: getattr(config, "init_lora_weights", None) for adapter, config in configs.items()}
    known = {adapter for adapter, start in starts.items() if start is True or start == "gaussian"}
    known -= {adapter for adapter in known if getattr(configs[adapter], "use_dora", False)}
    if unknown := starts.keys() - known:
        warnings.warn(
            f"adapter {min(unknown)} (init_lora_weights={starts[min(unknown)]}) has undefined values: load a "
            f"checkpoint, or call peft.get_peft_model for a model that has weights",
            stacklevel=3,
        )
    if not known:
        return
    seed = [torch.initial_seed()]
    if dist.is_initialized():
        dist.broadcast_object_list(seed, src=0)
    generator = torch.Generator("cpu").manual_seed(seed[0])
    for name, parameter in model.named_parameters():
        found = _LORA_WEIGHT.fullmatch(name)
        if not found or found["adapter"] not in known:
            continue
        values = torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")
        if found["half"] == "embedding_B":
            values.normal_(generator=generator)
        elif found["half"] == "A" and starts[found["adapter"]] == "gaussian":
            layer: Any = model.get_submodule(found["layer"])
            values.normal_(std=1 / layer.r[found["adapter"]], generator=generator)
        elif found["half"] == "A":
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        local_values(parameter).copy_(values[local_part(parameter)])


def prepare_adapters(model: nn.Module, name: str) -> None:
    """Make adapters of a sharded model merge into its shards, and its base model say why it cannot be called.

    ``name`` is that of the model's class before it was sharded.
    """
    if not is_adapted(model):
        return
    for layer, module in model.named_modules():
        if hasattr(module, "base_layer"):
            forward = vars(module).get("forward")
            merging: Any = forward if isinstance(forward, ExpertAdapter) else module
            for verb in ("merge", "unmerge"):
                setattr(module, verb, _MergeIntoShards(getattr(merging, verb), module, layer))
    base = base_model(model)
    if base is not model and (first := _first_of_root(model)):
        base.register_forward_pre_hook(_BaseCall(name, *first))


def distribute_adapters(model: nn.Module) -> None:
    """Let LoRA on experts train in a model that transformers has distributed; not a collective.

    peft would add the difference of whole matrices to this rank's part of them. Call it when peft has wrapped a model
    made within ``registered_with_transformers``; ``parallelize`` does the same for its models. Adapters stay the
    parameters that peft made, whole on every rank: transformers' ``Trainer`` averages their gradients over ranks.

    Raises:
        ValueError: for a model without experts that fusco moves tokens to, and for other adapters on experts than LoRA
            on the projections.
    """
    count = 0
    for name, module in list(model.named_modules()):
        layer = layer_of(module)
        if layer is None:
            continue
        count += 1
        num_local = len(layer.experts.local(layer.experts.up_name))
        first = layer.dispatcher.group.rank() * num_local
        wrappers = find_expert_adapters(name, module, model)
        layer.experts.adapters[:] = [ExpertAdapter(wrapper, module, first, num_local) for wrapper in wrappers]
        for adapter in layer.experts.adapters:
            adapter.layer.forward = adapter
            adapter.layer.merge, adapter.layer.unmerge = adapter.merge, adapter.unmerge
    if not count:
        raise ValueError(f"{type(model).__name__} has no experts that fusco moves tokens to")


@dataclass(frozen=True, eq=False)
class _MergeIntoShards:
    """``merge`` or ``unmerge`` of a layer with adapters, whose assignments to ``data`` change the shards.

    peft (0.21) assigns to ``weight.data`` when it merges with ``safe_merge=True``, DoRA and others. For a ``DTensor``
    (PyTorch 2.13) that has no effect, without an error.
    """

    run: Callable[..., Any]
    layer: nn.Module
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(is_whole_copy(parameter) for parameter in self.layer.parameters()):
            raise ValueError(
                f"weights of {self.name} are whole copies, as after a forward pass without its backward pass, and "
                f"merging into them would be lost: evaluate in torch.no_grad(), after which they are sharded again"
            )
        with _AssignedData():
            return self.run(*args, **kwargs)


class _AssignedData(TorchFunctionMode):
    """Assignments to the ``data`` of a ``DTensor`` change its values in place."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.data.__set__ and isinstance(args[0], DTensor):  # type: ignore[attr-defined]
            target, values = args
            with torch.no_grad():
                local = values.redistribute(target.device_mesh, target.placements).to_local()
                return target.to_local().copy_(local)
        return func(*args, **(kwargs or {}))


def _first_of_root(model: nn.Module) -> tuple[nn.Module, str] | None:
    """Return module and key of a parameter that only the forward pass of the whole model gathers."""
    wrapped = [f"{name}." for name, module in model.named_modules() if name and isinstance(module, FSDPModule)]
    for name, _ in model.named_parameters():
        if not name.startswith(tuple(wrapped)):
            owner, _, key = name.rpartition(".")
            return model.get_submodule(owner), key
    return None


@dataclass(frozen=True, eq=False)
class _BaseCall:
    """Hook of a base model, such as ``merge_and_unload`` returns: only the ``PeftModel`` around it gathers weights."""

    wrapper: str  # name of its class
    owner: nn.Module  # of the parameter that tells whether they are
    key: str

    def __call__(self, base: nn.Module, args: Any) -> None:  # noqa: ARG002  the signature of a hook
        if isinstance(getattr(self.owner, self.key), DTensor):
            raise ValueError(  # noqa: TRY004  the caller's mistake is another one
                f"the parameters of this {type(base).__name__} are gathered by the {self.wrapper} that was "
                f"parallelized: call that one, also after merge_and_unload, whose result can be written with "
                f"fusco.fsdp.save_hugging_face"
            )
