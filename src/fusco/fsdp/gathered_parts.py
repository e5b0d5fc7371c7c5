"""The weights of a sharded model, gathered on rank 0 a few blocks at a time, and written as files of the hub."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fusco.fsdp.adapters import adapter_names, is_adapted
from fusco.fsdp.hugging_face_folder import INDEX, SINGLE
from fusco.fsdp.shards import whole_values
from fusco.fsdp.zero_experts import cut_rows, with_zeros

Weights = dict[str, Any]

_BLOCK = re.compile(r"(.*?\.\d+)\.")


def gathered_parts(model: nn.Module, max_bytes: int) -> Iterator[Weights]:
    """Yield a model's weights on rank 0, and as many empty parts on the others; every step is a collective.

    Weights outside of blocks come first, together, then blocks, whole, as many as ``max_bytes`` allows, at least one:
    transformers converts the names and layouts of a block together. Of a model with adapters come these, what they
    train, and what is outside of blocks. In addition to its shards, rank 0 has a part, and every rank one weight at a
    time, with the copies that PyTorch makes to gather it.
    """
    state: Mapping[str, Any] = get_model_state_dict(model)
    names = adapter_names(model, state) if is_adapted(model) else set(state)
    grouped = _grouped({name: each for name, each in state.items() if name in names}, max_bytes)
    owners = {name: id(each) for name, each in model.state_dict(keep_vars=True).items()}
    num_cut = cut_rows(model)
    for group in grouped:
        part: Weights = {}
        first: dict[int, str] = {}  # the name of a tied parameter, which is gathered and written once
        for name in group:
            tied = first.setdefault(owners.get(name, -len(first)), name)
            values = _gathered(state[name]) if tied == name else part.get(tied)
            if isinstance(values, torch.Tensor) and name in num_cut:
                values = with_zeros(values, num_cut[name])
            if dist.get_rank() == 0:
                part[name] = values
        yield part


def write_parts(folder: Path, model: Any, parts: Iterable[Weights]) -> None:
    """Write parts of a model's weights into an empty folder, each into a file, and what else transformers writes."""
    inside = folder / "part"
    written: list[Path] = []
    key_to_file: dict[str, Path] = {}
    num_bytes = 0
    for part in parts:
        model.save_pretrained(inside, state_dict=part, max_shard_size=1 << 62)
        if (inside / SINGLE).exists():
            file = (inside / SINGLE).rename(folder / f"{len(written)}.safetensors")
            keys, size = _contents(file)
            written.append(file)
            key_to_file |= dict.fromkeys(keys, file)
            num_bytes += size
    for file in inside.iterdir():
        shutil.move(file, folder / file.name)
    inside.rmdir()
    if len(written) == 1:
        written[0].rename(folder / SINGLE)
        return
    names = {file: f"model-{number:05d}-of-{len(written):05d}.safetensors" for number, file in enumerate(written, 1)}
    for file, name in names.items():
        file.rename(folder / name)
    index = {
        "metadata": {"total_size": num_bytes},
        "weight_map": {key: names[file] for key, file in key_to_file.items()},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _grouped(state: Mapping[str, Any], max_bytes: int) -> list[list[str]]:
    """Return the names of each part: those outside of blocks, then those of consecutive blocks."""
    blocks: dict[str, list[str]] = {"": []}
    for name in state:
        found = _BLOCK.match(name)
        blocks.setdefault(found[1] if found else "", []).append(name)
    parts: list[list[str]] = []
    size = 0
    for names in blocks.values():
        added = sum(_num_bytes(state[name]) for name in names)
        if not parts or size + added > max_bytes:
            parts.append([])
            size = 0
        parts[-1] += names
        size += added
    return [names for names in parts if names]


def _num_bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _gathered(value: Any) -> Any:
    """Return the values of all ranks in main memory on rank 0, ``None`` on others; a collective."""
    values = whole_values(value.detach()) if isinstance(value, torch.Tensor) else value
    if dist.get_rank():
        return None
    return values.cpu() if isinstance(values, torch.Tensor) else values


def _contents(file: Path) -> tuple[list[str], int]:
    """Return the names of tensors in a file of safetensors, and their bytes, from its header."""
    with file.open("rb") as opened:
        header: dict[str, Any] = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    header.pop("__metadata__", None)
    return list(header), max((each["data_offsets"][1] for each in header.values()), default=0)
