"""When and where a run is saved, and whether it continues one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fusco import fsdp


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Saves of a run, after every so many steps and after the last."""

    folder: Path  # absolute
    every: int | None = None  # steps; ``None`` means after the last step only
    keep_last: int | None = None  # as for ``fusco.fsdp.save_run``
    resumes: bool = False  # whether the run continues the one in the folder

    def is_due(self, num_done: int, num_steps: int) -> bool:
        """Return whether to save after ``num_done`` of ``num_steps`` steps."""
        return num_done == num_steps or (self.every is not None and num_done % self.every == 0)


class RunSaver:
    """Saves a run where it is to be saved."""

    def __init__(self, saving: Saving | None, state: fsdp.RunState, saver: fsdp.AsyncSaver | None) -> None:
        self._saving, self._state, self._saver = saving, state, saver

    def load(self) -> int:
        """Return the number of finished steps of the run that is continued, 0 for a new one; a collective."""
        return fsdp.load_run(self._saving.folder, self._state) if self._saving and self._saving.resumes else 0

    def save_if_due(self, num_done: int, num_steps: int) -> None:
        """Save after a step if it is due; a collective."""
        if self._saving and self._saver and self._saving.is_due(num_done, num_steps):
            self._saver.save(num_done)


@contextmanager
def saving_run(saving: Saving | None, state: fsdp.RunState) -> Iterator[RunSaver]:
    """Yield the saver of a run; the end of the block waits for its last save."""
    if saving is None:
        yield RunSaver(None, state, None)
        return
    with fsdp.AsyncSaver(saving.folder, state, keep_last=saving.keep_last) as saver:
        yield RunSaver(saving, state, saver)
