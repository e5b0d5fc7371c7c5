"""Runs of transformers' ``Trainer`` that are saved and continued with ``save_run`` and ``load_run``."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fusco.fsdp.run_state import (
    HasState,
    RunState,
    check_numbers,
    load_run,
    random_state,
    read_others,
    save_run,
    set_random_state,
)

_STATE = "trainer_state.json"  # the file in which Trainer looks for its position
_LOADS = ("_load_from_checkpoint", "_load_rng_state")  # methods of Trainer (transformers 5.23) for its own files


class TrainerCheckpoint:
    """A callback of transformers' ``Trainer`` that saves a run every few steps, and continues it bit for bit.

    transformers (5.23) refuses to continue models that it has distributed at load time, such as those made within
    ``registered_with_transformers``, and writes whole copies of models. This saves model, optimizer, scheduler, random
    states and the position in the data in folders as those of ``save_run``, each rank its part.

    Use ``TrainerCheckpoint(folder, every=50).train(trainer)`` in place of ``trainer.train()``, with
    ``save_strategy="no"`` among the trainer's arguments.
    """

    def __init__(self, folder: str | Path, *, every: int, keep_last: int | None = None) -> None:
        """Save into ``folder`` every ``every`` steps of the optimizer, and at the end; keep the last ``keep_last``.

        Raises:
            ValueError: for an ``every`` or a ``keep_last`` below 1.
        """
        if every < 1:
            raise ValueError(f"every must be positive, got {every}")
        check_numbers(0, keep_last)
        self.folder, self.every, self.keep_last = Path(folder), every, keep_last
        self._trainer: Any = None  # while it trains
        self._resumed: Path | None = None  # the folder of the step that it continues from
        self._saved = 0  # the last step that is saved
        self._is_due = False

    def train(self, trainer: Any, **options: Any) -> Any:
        """Call ``trainer.train(**options)``, from the step that was saved last if there is one; a collective.

        Returns:
            What ``trainer.train`` returns.

        Raises:
            OSError, ValueError: on all ranks, as ``load_run`` and ``save_run``, and for another number of ranks.
            RuntimeError: for a version of transformers whose ``Trainer`` does not load as that of 5.23 does.
        """
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        found = read_others(self.folder)
        self._trainer, self._is_due = trainer, False
        try:
            if found is None:
                self._resumed, self._saved = None, 0
                return trainer.train(**options)
            self._resumed, others = found
            with _position(others["trainer"]) as position, _own_loads(trainer, others["trainer"]):
                return trainer.train(resume_from_checkpoint=position, **options)
        finally:
            self._trainer = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:  # noqa: ARG002  the signature is Trainer's
        """Load the step that was saved last, once Trainer has made its optimizer."""
        if self._trainer is None:
            raise RuntimeError(
                f"TrainerCheckpoint continues runs only if it starts them: call train(trainer) of it in place of "
                f"trainer.train() (folder {self.folder})"
            )
        if self._resumed:
            self._saved = load_run(self._resumed, self._run_state(objects))

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:  # noqa: ARG002  the signature is Trainer's
        """Decide whether this step is saved; Trainer first logs and evaluates."""
        self._is_due = self._is_due or state.global_step % self.every == 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:  # noqa: ARG002  the signature is Trainer's
        """Save the step before, if it is to be saved."""
        self._save(state, objects)

    on_epoch_end = on_step_begin

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:  # noqa: ARG002  the signature is Trainer's
        """Save the last step."""
        self._is_due = state.global_step > self._saved
        self._save(state, objects)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Take part in all other events of a ``TrainerCallback``, without importing transformers for its class."""
        if not name.startswith("on_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        return _ignore

    def _save(self, state: Any, objects: dict[str, Any]) -> None:
        if self._is_due:
            self._is_due, self._saved = False, state.global_step
            save_run(self.folder, state.global_step, self._run_state(objects), keep_last=self.keep_last)

    def _run_state(self, objects: dict[str, Any]) -> RunState:
        model: nn.Module = objects["model"]
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation leaves whole copies
        optimizer = objects["optimizer"]
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        others: dict[str, HasState | torch.Generator] = {"trainer": _TrainerState(self._trainer)}
        if scaler := getattr(self._trainer.accelerator, "scaler", None):
            others["scaler"] = scaler
        return RunState(model=model, optimizer=optimizer, scheduler=objects["lr_scheduler"], others=others)


class _TrainerState:
    """A trainer's position, and the random state with which it goes on after it has skipped data."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the state as Trainer writes it, with that of its callbacks."""
        trainer = self._trainer
        state = deepcopy(trainer.state)
        for callback in (*trainer.callback_handler.callbacks, trainer.control):
            if hasattr(type(callback), "state") and type(callback).__name__ in state.stateful_callbacks:
                state.stateful_callbacks[type(callback).__name__] = callback.state()
        return {"position": json.dumps(asdict(state)), "random": random_state()}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Do nothing: Trainer has read the position before it makes an optimizer."""


@contextmanager
def _position(state: dict[str, Any]) -> Iterator[str]:
    """Yield a folder in which Trainer finds its position."""
    with tempfile.TemporaryDirectory(prefix="fusco-") as folder:
        (Path(folder) / _STATE).write_text(state["position"], encoding="utf-8")
        yield folder


@contextmanager
def _own_loads(trainer: Any, state: dict[str, Any]) -> Iterator[None]:
    """Keep Trainer from looking for files of weights, and set random states where it would."""
    if missing := [name for name in _LOADS if not callable(getattr(trainer, name, None))]:
        raise RuntimeError(
            f"this version of transformers has no {type(trainer).__name__}.{missing[0]}: its runs cannot be continued"
        )
    replacements: tuple[Callable[..., None], ...] = (_ignore, lambda *_: set_random_state(state["random"]))
    for name, replacement in zip(_LOADS, replacements, strict=True):
        setattr(trainer, name, replacement)
    try:
        yield
    finally:
        for name in _LOADS:
            delattr(trainer, name)


def _ignore(*_: Any, **__: Any) -> None:
    pass
