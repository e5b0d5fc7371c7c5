"""The folder of a run: a folder for each saved step, complete or invisible, and the name of the latest one.

A save is written into a hidden folder, which is renamed when it is complete; then ``latest`` is replaced, and only then
are earlier steps removed, each by renaming it to a hidden folder first. So whatever is killed, ``latest`` names a step
that is whole.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from uuid import uuid4

from fusco.core.files import written_beside

LATEST = "latest"  # the file with the name of the step that was saved last
_STEP = re.compile(r"step-(\d{8,})(?:-(\d+))?")  # a second save of a step has a number, until the first is removed
_HIDDEN = ".step-"


def find_latest(folder: Path) -> Path | None:
    """Return the folder of the step that was saved last; ``None`` if there is no complete one."""
    try:
        named = folder / (folder / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        named = folder
    if named != folder and named.is_dir():
        return named
    steps = _find_steps(folder)
    return steps[-1][1] if steps else None  # killed before the first ``latest``, or it was removed by hand


def begin_step(folder: Path) -> Path:
    """Return a new hidden folder to write a step into, and remove what earlier saves left; on one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{_HIDDEN}*"):
        shutil.rmtree(left, ignore_errors=True)
    for left in folder.glob(f".{LATEST}.*"):
        left.unlink(missing_ok=True)
    hidden = folder / f"{_HIDDEN}{uuid4().hex}"
    hidden.mkdir()
    return hidden


def complete_step(hidden: Path, step: int, keep_last: int | None) -> Path:
    """Make a step visible, as the latest, and remove earlier ones but ``keep_last``; on one rank. Return its folder.

    Steps after this one are of a run that has been abandoned, and stay.
    """
    folder = hidden.parent
    earlier = [(number, path) for number, path in _find_steps(folder) if number <= step]
    complete = folder / f"step-{step:08d}"
    again = 1
    while complete.exists():
        again += 1
        complete = folder / f"step-{step:08d}-{again}"
    hidden.rename(complete)
    with written_beside(folder / LATEST) as beside:
        beside.write_text(f"{complete.name}\n", encoding="utf-8")
    replaced = [path for number, path in earlier if number == step]
    others = [path for number, path in earlier if number < step]
    surplus = [] if keep_last is None else others[: max(0, len(others) - keep_last + 1)]
    for path in (*replaced, *surplus):
        removed = folder / f"{_HIDDEN}{uuid4().hex}"
        path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
    return complete


def _find_steps(folder: Path) -> list[tuple[int, Path]]:
    """Return all complete steps and their folders, in ascending order."""
    named = [(_STEP.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    found = sorted((int(name[1]), int(name[2] or 1), path) for name, path in named if name and path.is_dir())
    return [(step, path) for step, _, path in found]
