"""Read arrays from a user's files; errors name the file."""

from __future__ import annotations

import zipfile
import zlib
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROUTING, PROMPTS = "qwen3_30b_a3b_sharegpt1024.npz", "azure_llm_2023_conv.npz"


def load_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an npz file by name, or that of an npy file as ``""``; ``ValueError`` for anything else."""
    try:
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.ndarray):
            return {"": content}
        with content:
            return {name: content[name] for name in content.files}
    except (ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is not an npy or npz file of numbers") from error


def load_shipped(name: str) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an npz file that comes with fusco: ``ROUTING`` or ``PROMPTS``."""
    with resources.as_file(resources.files("fusco.data") / name) as path:
        return load_arrays(path)


def load_array(path: Path) -> npt.NDArray[Any]:
    """Return the array of an npy file; ``ValueError`` for anything else."""
    content = load_arrays(path)
    if "" not in content:
        raise ValueError(f"{path} holds {', '.join(content)} as an npz file; an npy file of one array is needed")
    return content[""]


def load_integers_of_csv(path: Path) -> list[list[int]]:
    """Return the rows of a CSV file of integers without header; ``ValueError`` names a line that is not one."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # spreadsheets write a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file") from error
    rows: list[list[int]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append([int(cell) for cell in line.split(",")])
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: expected integers with commas between them, got {line!r}"
            ) from error
        if len(rows[-1]) != len(rows[0]):
            raise ValueError(f"{path}, line {number}: {len(rows[-1])} entries, but {len(rows[0])} in the first row")
    if not rows:
        raise ValueError(f"{path} is empty")
    return rows
