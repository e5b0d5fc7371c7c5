"""Folders of Hugging Face weights whose files are those of one save, or none."""

from __future__ import annotations

import filecmp
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# A reader finds weights by these; it prefers the first of the two that name a model's.
_ENTRIES = {SINGLE, INDEX, "adapter_model.safetensors"}
_SHARD = re.compile(r"model(-.*)?-\d{5}-of-\d{5}\.safetensors")
_UNFINISHED = ".unfinished-"


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
