"""Hugging Face weight files: read part by part into a parallelized model, and written from one."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fusco.fsdp.adapters import base_model, base_names, is_adapted
from fusco.fsdp.gathered_parts import INDEX, SINGLE, cut_rows, gathered_parts, plan_parts, replaced_weights, write_parts
from fusco.fsdp.mesh import Part, local_part, local_values


@torch.no_grad()
def load_hugging_face(path: str | Path, model: nn.Module) -> None:
    """Read weights that ``save_pretrained`` wrote or that come from a hub, each rank its part; not a collective.

    Names and layouts are converted as transformers does when it loads. In addition to the model, a rank's main memory
    holds one parameter at a time: its part, or, where files have a tensor per expert, the experts of its "ep" rank.
    Below the adapters of peft, weights are read as for the plain model, also into the copies that ``modules_to_save``
    made; the adapters' own weights stay.

    Args:
        path: a folder with ``model.safetensors``, or with several files and their index.
        model: a parallelized model of transformers, with memory (``materialize``). Values of parameters, and of buffers
            that are in files, are overwritten.

    Raises:
        FileNotFoundError: for a folder without such files.
        ValueError: for quantized weights, a model on the meta device, adapters that depend on the weights (such as
            DoRA), and weights that are not in the files or have another shape there; values are undefined then.
    """
    state = model.state_dict(keep_vars=True)
    on_meta = [name for name, tensor in state.items() if tensor.is_meta]
    if on_meta:
        raise ValueError(f"{on_meta[0]} has no memory: call fusco.fsdp.materialize first")
    targets: dict[str, torch.Tensor] = {}
    copies: dict[str, list[torch.Tensor]] = {}  # that adapters train
    for name, base_name in base_names(model, state).items():
        if targets.setdefault(base_name, state[name]) is not state[name]:
            copies.setdefault(base_name, []).append(state[name])
    missing, base, num_cut = set(targets), base_model(model), cut_rows(model)
    with _Files(Path(path)) as files, original_classes(model):
        for source in _sources(base, files.keys(), targets):
            for name, values in source.read(files, base, targets, num_cut.get(source.name, 0)).items():
                for target in (targets[name], *copies.get(name, ())):
                    local_values(target).copy_(values)
                missing.discard(name)
    if missing := _untied(missing, targets):
        raise ValueError(f"{len(missing)} weights of the model are not in {path}, such as {min(missing)}")


def save_hugging_face(path: str | Path, model: nn.Module, *, max_file_bytes: int = 5 << 30) -> None:
    """Write a folder that ``from_pretrained`` reads; a collective of all ranks.

    Rank 0 gathers and writes a few weights at a time, so that no rank ever has the whole model. It checks that
    transformers would find every weight by its name in the files, and only then do they replace those of an earlier
    save in the folder, whose other files stay. Of a model with adapters (peft), only these are gathered and written.

    In addition to its shards, rank 0 needs twice the memory of the largest weight, which is a layer's stack of experts
    as a rule: as gathered, and in the layout of the files. Other ranks need a few MiB.

    Args:
        path: the folder.
        model: a parallelized model of transformers, with or without adapters.
        max_file_bytes: of a file, but for one with a single stack of experts. A model that fits is in one file,
            ``model.safetensors``, and another in several with an index.

    Raises:
        TypeError: for another model.
        ValueError: for a model that transformers has distributed, before anything is written; on rank 0 for files in
            which transformers would not find all weights.
        OSError: on the other ranks if rank 0 cannot write; rank 0 raises the cause.
    """
    save_pretrained: Any = getattr(model, "save_pretrained", None)
    if save_pretrained is None:
        raise TypeError(f"{type(model).__name__} has no save_pretrained: it is not a model of transformers")
    if getattr(getattr(model, "config", None), "distributed_config", None) is not None:
        raise ValueError(
            f"transformers has distributed this {original_class(type(model)).__name__} by its distributed_config and "
            f"writes it by itself: call model.save_pretrained(path) on all ranks"
        )
    with original_classes(model):
        planned = plan_parts(model)
    parts = gathered_parts(model, planned)
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            with original_classes(model), replaced_weights(Path(path)) as beside:
                if is_adapted(model):  # adapters are written by peft, with names of its own
                    save_pretrained(beside, state_dict={name: each for part in parts for name, each in part.items()})
                else:
                    write_parts(beside, model, parts, max_file_bytes)
                    _check_names(Path(path), beside, model)
        except Exception as error:  # noqa: BLE001  any error must reach the other ranks, which wait for it
            failure = error
    for _ in parts:
        pass  # the other ranks; or, after a failure, the collectives that these expect
    outcome = [repr(failure) if failure else ""]
    dist.broadcast_object_list(outcome, src=0)
    if failure:
        raise failure
    if outcome[0]:
        raise OSError(f"rank 0 could not write {path}: {outcome[0]}")


def _check_names(path: Path, written: Path, model: Any) -> None:
    """Raise if transformers would not find every weight of a model in the files just written."""
    if not hasattr(model, "base_model_prefix"):
        return
    targets = model.state_dict(keep_vars=True)
    missing = targets.keys() - set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    with _Files(written) as files:
        for source in _sources(model, files.keys(), targets):
            missing -= source.names()
    if missing := _untied(missing, targets):
        raise ValueError(
            f"transformers would not find {len(missing)} weights of the model in its files, such as {min(missing)}: "
            f"{path} is left as it was"
        )


def _untied(missing: set[str], targets: dict[str, torch.Tensor]) -> set[str]:
    """Return the missing weights that are not tied to a present one."""
    present = {id(targets[name]) for name in targets.keys() - missing}
    return {name for name in missing if id(targets[name]) not in present}


class _Files(AbstractContextManager["_Files"]):
    """The tensors of a folder, by name. Files are opened on first use and stay open, since each has a long index."""

    def __init__(self, path: Path) -> None:
        index, single = path / INDEX, path / SINGLE
        config = path / "config.json"
        if config.exists() and "quantization_config" in json.loads(config.read_text()):
            raise ValueError(f"{path} has quantized weights, which cannot be read in parts: convert them to bfloat16")
        self._opened: dict[Path, Any] = {}
        if single.exists():  # transformers prefers this one if both exist
            self._key_to_file = dict.fromkeys(self._open(single).keys(), single)
        elif index.exists():
            self._key_to_file = {key: path / name for key, name in json.loads(index.read_text())["weight_map"].items()}
        else:
            raise FileNotFoundError(f"{path} has neither {single.name} nor {index.name}")

    def keys(self) -> list[str]:
        return list(self._key_to_file)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._open(self._key_to_file[key]).get_slice(key).get_shape())

    def read(self, key: str, part: Part | None = None) -> torch.Tensor:
        opened = self._open(self._key_to_file[key])
        return opened.get_slice(key)[part] if part else opened.get_tensor(key)

    def __exit__(self, *_: object) -> None:
        for opened in self._opened.values():
            opened.__exit__(None, None, None)
        self._opened.clear()

    def _open(self, path: Path) -> Any:
        if path not in self._opened:
            self._opened[path] = importlib.import_module("safetensors").safe_open(path, framework="pt").__enter__()
        return self._opened[path]


@dataclass
class _Source:
    """The tensors in files that a parameter is made from, by the pattern that their names match, and the converter."""

    name: str  # of the parameter or buffer, the first one if there are several
    converter: Any  # of transformers; ``None`` if the tensor needs no conversion
    # for each pattern of the converter the names in the files, in order of experts
    pattern_to_keys: dict[str, list[str]] = field(default_factory=dict)

    def names(self) -> set[str]:
        """Return every parameter or buffer made from this source; a converter can split tensors of files."""
        if self.converter is None:
            return {self.name}
        first, *_ = patterns = self.converter.target_patterns
        return {self.name.replace(first, each) for each in patterns}

    def read(
        self, files: _Files, model: nn.Module, targets: dict[str, torch.Tensor], num_cut: int
    ) -> dict[str, torch.Tensor]:
        """Return this rank's part of everything made from this source, of whose rows the last ``num_cut`` are left out.

        Files without these rows are read, too.
        """
        target = targets[self.name]
        part = local_part(target)
        if self.converter is None:
            ((key,),) = self.pattern_to_keys.values()
            num_rows, *rest = files.shape(key) or (0,)
            shape = (num_rows - num_cut, *rest) if num_cut and num_rows != len(target) else files.shape(key)
            _check_shape(self.name, target, shape)
            return {self.name: files.read(key, part)}
        # If files have a tensor per expert, only this rank's experts are read, and then stacked.
        first = self.converter.operations[0]
        stacks_experts = type(first).__name__ == "MergeModulelist" and first.dim == 0
        pattern_to_keys = {
            pattern: keys[: len(target)] if num_cut else keys for pattern, keys in self.pattern_to_keys.items()
        }
        has_expert_tensors = stacks_experts and all(len(keys) == len(target) for keys in pattern_to_keys.values())
        if has_expert_tensors and part[0].start == part[0].stop:
            return {self.name: local_values(target)}  # this rank has none
        for pattern, keys in pattern_to_keys.items():
            for key in keys[part[0]] if has_expert_tensors else keys:
                self.converter.add_tensor(self.name, key, pattern, files.read(key))
        name_to_part = {}
        for name, converted in self.converter.convert(self.name, model=model, config=model.config).items():
            values = converted[0] if isinstance(converted, list) else converted
            shape = (len(targets[name]), *values.shape[1:]) if has_expert_tensors else values.shape
            _check_shape(name, targets[name], shape)
            part = local_part(targets[name])
            name_to_part[name] = values[(slice(None), *part[1:]) if has_expert_tensors else part]
        return name_to_part


def _sources(model: nn.Module, keys: Iterable[str], targets: dict[str, torch.Tensor]) -> list[_Source]:
    """Map the names in files to the model's, as transformers does."""
    loading: Any = importlib.import_module("transformers.core_model_loading")
    mapping: Any = importlib.import_module("transformers.conversion_mapping")
    transforms = mapping.get_model_conversion_mapping(model)
    converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
    renamings = [each for each in transforms if not isinstance(each, loading.WeightConverter)]
    pattern_to_converter = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix = model.base_model_prefix
    sources: dict[str, _Source] = {}
    unknown = []
    for key in sorted(keys, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, targets)
        if name not in targets and key in targets:
            name, pattern = key, None
        if name not in targets:
            unknown.append(key)
        elif pattern is None:
            sources[name] = _Source(name, None, {key: [key]})
        else:
            source = sources.setdefault(name, _Source(name, deepcopy(pattern_to_converter[pattern])))
            source.pattern_to_keys.setdefault(pattern, []).append(key)
    if unknown:
        warnings.warn(f"{len(unknown)} weights in the files are not in the model, such as {unknown[0]}", stacklevel=3)
    return list(sources.values())


def _check_shape(name: str, target: torch.Tensor, shape: Iterable[int]) -> None:
    if tuple(target.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(target.shape)} in the model and {tuple(shape)} in the files")


@contextmanager
def original_classes(model: nn.Module) -> Iterator[None]:
    """Restore the classes that modules had before ``fully_shard``, for the duration of the block.

    ``fully_shard`` derives a class ``FSDP<Name>`` in a PyTorch module. transformers (5.23) finds the names of weights
    in files by the name of a class, and treats a class from another module as user code, without such names. Only
    classes change: hooks and state of FSDP stay. The model must not run in the block.
    """
    sharded: list[tuple[nn.Module, type[nn.Module]]] = [
        (module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)
    ]
    try:
        for module, sharded_class in sharded:
            module.__class__ = original_class(sharded_class)
        yield
    finally:
        for module, sharded_class in sharded:
            module.__class__ = sharded_class


def original_class(sharded_class: type[nn.Module]) -> type[nn.Module]:
    """Return the class that ``fully_shard`` derived this one from; any other class is returned as it is."""
    if FSDPModule not in sharded_class.__bases__:
        return sharded_class
    (original,) = (base for base in sharded_class.__bases__ if base is not FSDPModule)
    return original
