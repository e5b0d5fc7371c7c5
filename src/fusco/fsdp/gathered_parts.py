"""The weights of a sharded model, gathered on rank 0 a few at a time, and written as files of the hub: all or none."""

from __future__ import annotations

import filecmp
import importlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fusco.fsdp.adapters import adapter_names, is_adapted
from fusco.fsdp.layer import layers_of
from fusco.fsdp.mesh import Part, device_type_of, local_part, local_values

Weights = dict[str, Any]

_BLOCK = re.compile(r"(.*?\.\d+)\.")
_BYTES_AT_ONCE = 4 << 20  # that rank 0 receives from all ranks together, or copies from file to file
_SMALL_BYTES = 4 << 20  # of weights that are written at once, since transformers writes its configuration each time
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# A reader finds weights by these; it prefers the first of the two that name a model's.
_ENTRIES = {SINGLE, INDEX, "adapter_model.safetensors"}
_SHARD = re.compile(r"model(-.*)?-\d{5}-of-\d{5}\.safetensors")
_UNFINISHED = ".unfinished-"


def plan_parts(model: nn.Module) -> list[list[str]]:
    """Return the names of weights in each part that is gathered and written at once; equal on all ranks.

    A part has at most the bytes of the model's largest weight, or is small. But tied weights stay together, and so does
    a block, or all that is outside of blocks, if transformers converts it into other weights as a whole than in parts.
    Of a model with adapters there are these, what they train, and what is outside of blocks.
    """
    state: Mapping[str, Any] = get_model_state_dict(model)
    chosen = adapter_names(model, state) if is_adapted(model) else set(state)
    owners = {name: id(each) for name, each in model.state_dict(keep_vars=True).items()}
    limit = max(_SMALL_BYTES, *map(_num_bytes, state.values()))
    blocks: dict[str, dict[object, list[str]]] = {"": {}}  # tied names by their owner, by block
    for name in filter(chosen.__contains__, state):
        found = _BLOCK.match(name)
        blocks.setdefault(found[1] if found else "", {}).setdefault(owners.get(name, name), []).append(name)
    planned: list[list[str]] = []
    for owned in blocks.values():
        parts: list[list[str]] = []
        size = 0
        for names in owned.values():
            added = _num_bytes(state[names[0]])
            if not parts or size + added > limit:
                parts.append([])
                size = 0
            parts[-1] += names
            size += added
        if len(parts) > 1 and not is_adapted(model) and not _converts_in_parts(model, state, parts):
            parts = [[name for part in parts for name in part]]
        planned += parts
    return planned


def gathered_parts(model: nn.Module, planned: Sequence[Sequence[str]]) -> Iterator[Weights]:
    """Yield each planned part on rank 0, and as many empty ones on the others; every step is a collective.

    In addition to its shards, rank 0 has a part and, while it is gathered, a few rows of each rank.
    """
    state: Mapping[str, Any] = get_model_state_dict(model)
    owners = {name: id(each) for name, each in model.state_dict(keep_vars=True).items()}
    slices = {name: local_part(each) for name, each in state.items() if isinstance(each, torch.Tensor)}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, slices)
    num_cut = cut_rows(model)
    for names in planned:
        part: Weights = {}
        first: dict[object, str] = {}  # the name of a tied parameter, which is gathered and written once
        for name in names:
            tied = first.setdefault(owners.get(name, name), name)
            if tied != name:
                part[name] = part[tied]
            elif isinstance(state[name], torch.Tensor):
                part[name] = _gathered(state[name].detach(), [of_rank[name] for of_rank in of_ranks])
                if part[name] is not None and name in num_cut:
                    part[name] = with_zeros(part[name], num_cut[name])
            else:
                part[name] = state[name]
        yield part if dist.get_rank() == 0 else {}


def write_parts(folder: Path, model: Any, parts: Iterable[Weights], max_file_bytes: int) -> None:
    """Write parts of a model's weights into files of an empty folder, and what else transformers writes.

    A part is emptied when it is written, so that its memory is free before the next one comes.
    """
    inside = folder / "part"
    files: list[list[Path]] = []  # of a part each, to be joined
    size = 0
    for part in parts:
        with _without_progress():
            model.save_pretrained(inside, state_dict=part, max_shard_size=1 << 62)
        part.clear()
        if not (inside / SINGLE).exists():
            continue
        if not files or size + (inside / SINGLE).stat().st_size > max_file_bytes:
            files.append([])
            size = 0
        size += (inside / SINGLE).stat().st_size
        files[-1].append((inside / SINGLE).rename(folder / f"{len(files)}-{len(files[-1])}.part"))
    for file in inside.iterdir():
        shutil.move(file, folder / file.name)
    inside.rmdir()
    total_size = 0
    key_to_file: dict[str, str] = {}
    for number, joined in enumerate(files, 1):
        name = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        keys, num_bytes = _join(joined, folder / name)
        key_to_file |= dict.fromkeys(keys, name)
        total_size += num_bytes
    if len(files) > 1:
        index = {"metadata": {"total_size": total_size}, "weight_map": key_to_file}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _converts_in_parts(model: nn.Module, state: Mapping[str, Any], parts: Sequence[Sequence[str]]) -> bool:
    """Return whether transformers makes the same weights of its files from parts as from all of them together."""
    revert: Any = getattr(importlib.import_module("transformers.core_model_loading"), "revert_weight_conversion", None)

    def shapes(names: Iterable[str]) -> dict[str, torch.Size]:
        tensors = {name: torch.empty_like(local_values(state[name]), device="meta") for name in names}
        whole = {name: each.new_empty(state[name].shape) for name, each in tensors.items()}
        return {name: each.shape for name, each in revert(model, whole).items()}

    try:
        of_parts = [shapes(part) for part in parts]
        together = shapes(name for part in parts for name in part)
    except Exception:  # noqa: BLE001  a conversion that needs values, or more of the block than a part
        return False
    return (
        sum(map(len, of_parts)) == len(together)
        and {name: shape for of_part in of_parts for name, shape in of_part.items()} == together
    )


def _num_bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _gathered(tensor: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor | None:
    """Return the values of all ranks in main memory on rank 0, ``None`` on others; a collective.

    ``parts`` are those of all ranks. Rank 0 receives a few rows of each at a time: PyTorch's own gathering (2.13) takes
    up to four times the memory of the tensor, on every rank.
    """
    local, is_first = local_values(tensor), dist.get_rank() == 0
    if all(each.stop - each.start == size for each, size in zip(parts[0], tensor.shape, strict=True)):
        return local.cpu() if is_first else None
    sizes = [[each.stop - each.start for each in part] for part in parts]
    row = max(prod(size[1:]) for size in sizes)
    num_rows = max(1, _BYTES_AT_ONCE // max(1, len(parts) * row * tensor.element_size()))
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") if is_first else None
    sent = torch.empty(num_rows * row, dtype=tensor.dtype, device=device_type_of(tensor))
    received = [torch.empty_like(sent).view(torch.uint8) for _ in parts] if is_first else None
    for first in range(0, max(size[0] for size in sizes), num_rows):
        mine = local[first : first + num_rows].flatten()
        sent[: len(mine)] = mine
        dist.gather(sent.view(torch.uint8), received, dst=0)  # bytes, since gloo does not have all dtypes
        if whole is None or received is None:
            continue
        for part, values in zip(parts, received, strict=True):
            start = part[0].start + first
            rows = (slice(start, max(start, min(start + num_rows, part[0].stop))), *part[1:])
            target = whole[rows]
            target.copy_(values.view(tensor.dtype)[: target.numel()].view(target.shape))
    return whole


def _join(files: Sequence[Path], into: Path) -> tuple[list[str], int]:
    """Write the tensors of files of safetensors into one, and remove these; return their names, and their bytes.

    The format, with tensors of larger elements first, so that all are aligned:
    https://github.com/huggingface/safetensors#format
    """
    found: list[tuple[int, Path, int, str, dict[str, Any]]] = []
    metadata: dict[str, str] = {}
    for file in files:
        with file.open("rb") as opened:
            start = 8 + int.from_bytes(opened.read(8), "little")
            header: dict[str, Any] = json.loads(opened.read(start - 8))
        metadata |= header.pop("__metadata__", {})
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            found.append(((begin - end) // max(1, prod(entry["shape"])), file, start + begin, name, entry))
    entries: dict[str, Any] = {"__metadata__": metadata}
    num_bytes = 0
    for _, _, _, name, entry in sorted(found, key=lambda each: each[:3]):
        begin, end = entry["data_offsets"]
        entries[name] = {**entry, "data_offsets": [num_bytes, num_bytes := num_bytes + end - begin]}
    if len(files) == 1:
        files[0].rename(into)
        return list(entries)[1:], num_bytes
    content = json.dumps(entries, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    with into.open("xb") as joined:
        joined.write(len(content).to_bytes(8, "little") + content)
        for _, file, start, name, _ in sorted(found, key=lambda each: each[:3]):
            begin, end = entries[name]["data_offsets"]
            with file.open("rb") as opened:
                opened.seek(start)
                for first in range(begin, end, _BYTES_AT_ONCE):
                    joined.write(opened.read(min(_BYTES_AT_ONCE, end - first)))
    for file in files:
        file.unlink()
    return list(entries)[1:], num_bytes


@contextmanager
def _without_progress() -> Iterator[None]:
    """Hide the progress bar that transformers shows for each part."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def cut_rows(model: nn.Module) -> dict[str, int]:
    """Return the number of rows that ``parallelize`` has cut off, by name of parameter."""
    return {
        f"{name}.{layer.experts.up_name}": layer.experts.num_zero_experts
        for name, layer in layers_of(model).items()
        if layer.experts.num_zero_experts
    }


def with_zeros(stack: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return a stack with zeros in place of rows that were cut off.

    Zero experts, as those of LongCat-Flash, have no weights and return the rows that they get; their ids follow those
    of the others. transformers (5.24) has rows of ``gate_up_proj`` for them, which nothing uses: ``parallelize`` cuts
    them off.
    """
    return torch.cat([stack, stack.new_zeros(num_rows, *stack.shape[1:])])


@contextmanager
def replaced_weights(path: Path) -> Iterator[Path]:
    """Yield a new folder within ``path`` whose files replace those of ``path`` at the end of the block.

    If the block raises, or its process dies, the weights in ``path`` stay as they were. If it dies in the moment in
    which files are renamed, and files other than weights differ from those before, ``path`` has no weights that can be
    found, but never a mixture. The next save removes what such a save left. Other files of ``path`` stay.
    """
    path.mkdir(parents=True, exist_ok=True)
    _remove_unused(path)
    beside = path / f"{_UNFINISHED}{uuid4().hex}"
    beside.mkdir()
    try:
        if (card := path / "README.md").exists():
            shutil.copy(card, beside)  # peft amends the one that it finds
        yield beside
        _rename_shards(path, beside)
        _publish(path, beside)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    _remove_unused(path)


def _rename_shards(path: Path, beside: Path) -> None:
    """Give shards names of their own if ``path`` has weights, so that no index ever refers to those of another save."""
    if not (beside / INDEX).exists() or not any((path / entry).exists() for entry in (SINGLE, INDEX)):
        return
    index = json.loads((beside / INDEX).read_text())
    save = uuid4().hex[:8]
    renamed = {name: name.replace("model-", f"model-{save}-", 1) for name in set(index["weight_map"].values())}
    for name, unique in renamed.items():
        (beside / name).rename(beside / unique)
    index["weight_map"] = {key: renamed[name] for key, name in index["weight_map"].items()}
    (beside / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _publish(path: Path, beside: Path) -> None:
    """Rename files: shards, which nothing refers to yet, then what differs, then what refers to weights."""
    names = [file.relative_to(beside) for file in sorted(beside.rglob("*")) if file.is_file()]
    entries = [name for name in names if name.name in _ENTRIES]
    shards = [name for name in names if _SHARD.fullmatch(name.name)]
    differing = [name for name in names if name not in (*entries, *shards) and not _is_same(path / name, beside / name)]
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
    for name in shards:
        (beside / name).replace(path / name)
    if differing:
        for name in (path / SINGLE, path / INDEX, *(path / entry for entry in entries)):
            name.unlink(missing_ok=True)
    for name in (*differing, *entries):
        (beside / name).replace(path / name)
    if Path(INDEX) in entries:
        (path / SINGLE).unlink(missing_ok=True)
    elif Path(SINGLE) in entries:
        (path / INDEX).unlink(missing_ok=True)


def _is_same(file: Path, other: Path) -> bool:
    return file.is_file() and filecmp.cmp(file, other, shallow=False)


def _remove_unused(path: Path) -> None:
    """Remove shards that the index does not refer to, and what saves left that did not end."""
    for folder in path.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(folder)
    index = path / INDEX
    used = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else set()
    for file in path.glob("model-*.safetensors"):
        if _SHARD.fullmatch(file.name) and file.name not in used:
            file.unlink()
