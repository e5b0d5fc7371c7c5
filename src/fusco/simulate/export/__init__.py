"""Exports of a collective's messages for the field's simulators.

``goal``: ATLAHS and LogGOPSim. ``htsim``: connection matrices of csg-htsim. ``chakra``: execution traces of ASTRA-sim.
LogGOPSim has run its files, csg-htsim's reader has read its own; ASTRA-sim was not run.
"""

from pathlib import Path

from fusco.simulate.export.chakra import write_chakra
from fusco.simulate.export.goal import write_goal
from fusco.simulate.export.htsim import write_htsim
from fusco.simulate.messages import Messages

_SUFFIX_TO_WRITER = {".goal": write_goal, ".cm": write_htsim, ".et": write_chakra}


def write_export(messages: Messages, path: Path) -> None:
    """Write messages in the format of the suffix: ``.goal``, ``.cm`` or ``.et`` (a file a rank, ``NAME.RANK.et``)."""
    check_export(path)
    _SUFFIX_TO_WRITER[path.suffix](messages, path)


def check_export(path: Path) -> None:
    """Raise ``ValueError`` for a suffix that is none of the formats'."""
    if path.suffix not in _SUFFIX_TO_WRITER:
        raise ValueError(f"an export is a file {', '.join(_SUFFIX_TO_WRITER)}, got {path}")
