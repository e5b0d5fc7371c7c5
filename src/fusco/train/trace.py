"""Write the routing of a step to a file that ``fusco bench shuffle --traffic trace --trace FILE`` replays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_SUFFIXES = (".npz", ".npy")


def check_trace_path(path: Path) -> None:
    """Raise ``ValueError`` for a path that is not one of a trace, or whose directory is missing."""
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"a trace is a file {' or '.join(_SUFFIXES)}, got {path}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"there is no directory {path.absolute().parent} for the trace")


def write_trace(path: Path, routing: npt.NDArray[np.integer[Any]]) -> None:
    """Write ids (tokens, layers, topk) in the narrowest dtype that can represent them."""
    ids = routing.astype(np.min_scalar_type(int(routing.max(initial=0))))
    if path.suffix == ".npz":
        np.savez_compressed(path, topk_idx=ids)
    else:
        np.save(path, ids)
