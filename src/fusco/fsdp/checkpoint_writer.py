"""Writer of PyTorch's distributed checkpoints whose folder always has one complete checkpoint, from the first on."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from uuid import uuid4

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

METADATA = ".metadata"  # the file that says where the tensors of a checkpoint are


class CheckpointWriter(FileSystemWriter):
    """Writes every checkpoint into files of its own; renaming its ``.metadata`` puts it in place of the earlier one.

    PyTorch's writer (2.13) writes into the files of the earlier checkpoint, which loads as a mixture of both if a rank
    fails meanwhile.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.fs = _Renaming()

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose names of files, on one rank for all, and remove what earlier saves left."""
        self._remove_unused()
        save = uuid4().hex
        return [
            replace(plan, storage_data=replace(plan.storage_data, prefix=f"__{save}{plan.storage_data.prefix}"))
            for plan in super().prepare_global_plan(plans)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint, on one rank; all have written their files."""
        super().finish(metadata, results)
        self._remove_unused()

    def _remove_unused(self) -> None:
        """Remove files of tensors that are not of the folder's checkpoint."""
        folder = Path(self.path)
        used = _files_of(folder)
        for file in folder.glob("__*.distcp"):
            if file.name not in used:
                file.unlink(missing_ok=True)


class _Renaming(FileSystem):
    """Files that do not exist before they are renamed: PyTorch (2.13) removes the old ``.metadata`` first."""

    def exists(self, path: str | os.PathLike[str]) -> bool:  # noqa: ARG002  the signature is PyTorch's
        return False


def _files_of(folder: Path) -> set[str]:
    """Return the names of the files of the folder's checkpoint; none if it has none that can be read."""
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except (FileNotFoundError, EOFError, UnpicklingError):
        return set()
    return {each.relative_path for each in (metadata.storage_data or {}).values()}
