"""Exports of a collective's messages for the field's simulators.

``goal``: ATLAHS and LogGOPSim. ``htsim``: connection matrices of csg-htsim. ``chakra``: execution traces of ASTRA-sim.
LogGOPSim has run its files, csg-htsim's reader has read its own; ASTRA-sim was not run.
"""

from pathlib import Path

from fusco.simulate.export.chakra import file_of, write_chakra
from fusco.simulate.export.goal import write_goal
from fusco.simulate.export.htsim import write_htsim
from fusco.simulate.messages import Messages

_SUFFIX_TO_WRITER = {".goal": write_goal, ".cm": write_htsim, ".et": write_chakra}


def write_export(messages: Messages, path: Path) -> list[Path]:
    """Write messages in the format of the suffix, and return the files.

    ``.goal``, ``.cm`` or ``.et``, of which each rank has a file, ``NAME.RANK.et``.
    """
    check_export(path)
    _SUFFIX_TO_WRITER[path.suffix](messages, path)
    return [file_of(path, rank) for rank in range(messages.num_ranks)] if path.suffix == ".et" else [path]


def check_export(path: Path) -> None:
    """Raise ``ValueError`` for a suffix that is none of the formats'."""
    if path.suffix not in _SUFFIX_TO_WRITER:
        raise ValueError(f"an export is a file {', '.join(_SUFFIX_TO_WRITER)}, got {path}")
