"""The state of a run: model, optimizer, scheduler, step, random states of all ranks, and whatever has a state."""

from __future__ import annotations

import io
import random
import sys
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from fusco.core.files import written_beside
from fusco.fsdp.checkpoint import capture_checkpoint, load_checkpoint, write_checkpoint
from fusco.fsdp.checks import on_all_ranks
from fusco.fsdp.run_folder import begin_step, complete_step, find_latest

_SHARED = "run.pt"  # the file of what is equal on all ranks


class HasState(Protocol):
    """An object whose state can be saved, such as a scheduler or a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, of tensors and plain values."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Continue from a state."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunState:
    """What a run continues from, besides its step and random states.

    Attributes:
        model: parallelized.
        optimizer: of its parameters.
        scheduler: of the learning rate; equal on all ranks.
        others: objects whose states may differ between ranks, by name: data loaders, samplers, ``torch.Generator``.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    scheduler: HasState | None = None
    others: Mapping[str, HasState | torch.Generator] = field(default_factory=dict)


def save_run(folder: str | Path, step: int, state: RunState, *, keep_last: int | None = None) -> Path:
    """Save a run after ``step`` steps, into a folder of its own in ``folder``; a collective of all ranks.

    Whatever rank is killed, and whenever, ``folder`` has complete steps only, and its file ``latest`` the name of the
    one saved last. All ranks must see the same file system.

    Args:
        folder: of the run.
        step: the number of finished steps, not negative. A step that is saved again replaces the one before.
        state: is saved, with the random states of every rank (PyTorch, its GPU, Python, NumPy).
        keep_last: the number of steps to keep, this one included; ``None`` keeps all.

    Returns:
        The folder of the step.

    Raises:
        OSError: on all ranks, if one of them cannot write.
        ValueError: on all ranks, if a value cannot be saved, or for a negative step or a ``keep_last`` below 1.
    """
    check_numbers(step, keep_last)
    return _write(Path(folder), on_all_ranks(lambda: _capture(step, state)), keep_last)


def load_run(folder: str | Path, state: RunState) -> int:
    """Continue a run: load what ``save_run`` or ``AsyncSaver`` saved last; a collective of all ranks.

    On as many ranks as before the run continues as if it had not been interrupted, bit for bit. On another number of
    ranks, model, optimizer and scheduler do, and a warning says that random states are left as they are.

    Args:
        folder: of the run, or of one of its steps.
        state: as that which was saved: model and optimizer as for ``load_checkpoint``.

    Returns:
        The number of finished steps.

    Raises:
        FileNotFoundError: on all ranks, if no step is complete.
        OSError: on all ranks, if one of them cannot read.
        ValueError: on all ranks, for another model or optimizer, if only one of both has a scheduler, for other names
            in ``others``, and for any ``others`` on another number of ranks.
    """
    path = Path(on_all_ranks(lambda: str(_find_step(Path(folder))), of_first=True))
    shared, mine = on_all_ranks(lambda: _read(path, state))
    load_checkpoint(path, state.model, state.optimizer)
    if state.scheduler:
        state.scheduler.load_state_dict(shared["scheduler"])
    if mine is None:
        warnings.warn(
            f"{path} is of {shared['num_ranks']} ranks, and there are {_num_ranks()} now: random states are not loaded",
            stacklevel=2,
        )
        return int(shared["step"])
    for name, each in state.others.items():
        _set_state(each, mine["others"][name])
    set_random_state(mine["random"])
    return int(shared["step"])


def latest_run(folder: str | Path) -> Path | None:
    """Return the folder of the step of a run that was saved last; ``None`` if there is none."""
    return find_latest(Path(folder))


def read_others(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the folder of the step that was saved last, and this rank's states of ``others``; a collective.

    Returns ``None`` if no step is complete. Raises as ``load_run``, for any other number of ranks, too.
    """
    found = on_all_ranks(lambda: str(find_latest(folder) or ""), of_first=True)
    if not found:
        return None
    path = Path(found)

    def read() -> dict[str, Any]:
        num_ranks = torch.load(path / _SHARED, weights_only=True)["num_ranks"]
        if num_ranks != _num_ranks():
            raise ValueError(f"{path} is of {num_ranks} ranks, and there are {_num_ranks()} now")
        return torch.load(path / _rank_file(_rank()), weights_only=True, map_location="cpu")["others"]

    return path, on_all_ranks(read)


class AsyncSaver(AbstractContextManager["AsyncSaver"]):
    """Saves a run while it goes on: ``save`` copies its state to main memory, and a thread writes it.

    Use it in a ``with`` block, or call ``close``: both wait for the last save.
    """

    def __init__(
        self, folder: str | Path, state: RunState, *, keep_last: int | None = None, timeout_s: float = 600.0
    ) -> None:
        """Prepare saves; a collective of all ranks. Arguments are as for ``save_run``.

        ``timeout_s`` is the limit of a save. Ranks agree over a gloo group of their own, so that the collectives of the
        run, on any backend, are not disturbed.
        """
        check_numbers(0, keep_last)
        self._folder, self._state, self._keep_last = Path(folder), state, keep_last
        self._timeout_s = timeout_s
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if _num_ranks() > 1 else None
        self._thread = ThreadPoolExecutor(1, "fusco-save")
        self._saving: Future[Path] | None = None

    def save(self, step: int) -> None:
        """Wait for the save before, copy the state, and begin to write it; a collective, which raises as ``wait``."""
        check_numbers(step, self._keep_last)
        self.wait()
        captured = on_all_ranks(lambda: _copied(_capture(step, self._state)), self._group)
        self._saving = self._thread.submit(_write, self._folder, captured, self._keep_last, self._group)

    def wait(self) -> Path | None:
        """Wait until the last save is complete, and return the folder of its step; ``None`` without one.

        Raises:
            OSError: if a rank could not write.
            ValueError: if a value could not be saved.
            TimeoutError: after ``timeout_s``.
        """
        saving, self._saving = self._saving, None
        return saving.result(self._timeout_s) if saving else None

    def close(self) -> None:
        """Wait for the last save, as ``wait``, and release the thread and the group. A second call does nothing."""
        try:
            self.wait()
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._group = None

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
            return
        with suppress(Exception):  # the error of the block is the one to raise
            self.close()


@dataclass(frozen=True)
class _Captured:
    """A state to write: tensors of model and optimizer, what is equal on all ranks, and this rank's part."""

    step: int
    tensors: dict[str, Any]
    shared: bytes
    mine: bytes


def _capture(step: int, state: RunState) -> _Captured:
    shared: dict[str, Any] = {"step": step, "num_ranks": _num_ranks()}
    if state.scheduler:
        shared["scheduler"] = state.scheduler.state_dict()
    mine = {"random": random_state(), "others": {name: _get_state(each) for name, each in state.others.items()}}
    tensors = capture_checkpoint(state.model, state.optimizer)
    return _Captured(step, tensors, _packed("the scheduler", shared), _packed("one of others", mine))


def _copied(captured: _Captured) -> _Captured:
    """Return a state that the next step of the run does not change."""

    def copied(value: Any) -> Any:
        return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else deepcopy(value)

    return _Captured(captured.step, tree_map(copied, captured.tensors), captured.shared, captured.mine)


def _write(folder: Path, captured: _Captured, keep_last: int | None, group: dist.ProcessGroup | None = None) -> Path:
    """Write a step; a collective of the group."""
    hidden = Path(on_all_ranks(lambda: str(begin_step(folder)) if _rank() == 0 else "", group, of_first=True))
    write_checkpoint(hidden, captured.tensors, group)

    def write_parts() -> None:
        _write_file(hidden / _rank_file(_rank()), captured.mine)
        if _rank() == 0:
            _write_file(hidden / _SHARED, captured.shared)

    on_all_ranks(write_parts, group)

    def complete() -> str:
        return str(complete_step(hidden, captured.step, keep_last)) if _rank() == 0 else ""

    return Path(on_all_ranks(complete, group, of_first=True))


def _find_step(folder: Path) -> Path:
    path = folder if (folder / _SHARED).is_file() else find_latest(folder)
    if path is None:
        raise FileNotFoundError(f"{folder} has no saved step of a run")
    return path


def _read(path: Path, state: RunState) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return what is equal on all ranks, and this rank's part if there are as many ranks as were saved."""
    shared = torch.load(path / _SHARED, weights_only=True)
    if (state.scheduler is None) == ("scheduler" in shared):
        has, given = ("a", "none") if state.scheduler is None else ("no", "one")
        raise ValueError(f"{path} has {has} scheduler, and {given} is given")
    if shared["num_ranks"] != _num_ranks():
        if state.others:
            raise ValueError(
                f"{path} has the states of {', '.join(state.others)} on {shared['num_ranks']} ranks, and there are "
                f"{_num_ranks()} now: load it without others, and set them up for the step that load_run returns"
            )
        return shared, None
    mine = torch.load(path / _rank_file(_rank()), weights_only=True, map_location="cpu")
    if mine["others"].keys() != state.others.keys():
        raise ValueError(
            f"{path} has states of {', '.join(sorted(mine['others'])) or 'no others'}, and given are "
            f"{', '.join(sorted(state.others)) or 'none'}"
        )
    return shared, mine


def _get_state(each: HasState | torch.Generator) -> Any:
    return each.get_state() if isinstance(each, torch.Generator) else each.state_dict()


def _set_state(each: HasState | torch.Generator, state: Any) -> None:
    if isinstance(each, torch.Generator):
        each.set_state(state)
    else:
        each.load_state_dict(state)


def _packed(what: str, values: dict[str, Any]) -> bytes:
    """Return the bytes of a file of values; ``ValueError`` if it could not be loaded without running code in it."""
    packed = io.BytesIO()
    try:
        torch.save(values, packed)
        packed.seek(0)
        torch.load(packed, weights_only=True)
    except Exception as error:
        text = f"the state of {what} cannot be saved, as it has more than tensors and plain values: {error}"
        raise ValueError(text) from error
    return packed.getvalue()


def _write_file(path: Path, content: bytes) -> None:
    with written_beside(path) as beside:
        beside.write_bytes(content)


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def check_numbers(step: int, keep_last: int | None) -> None:
    """Raise ``ValueError`` for a negative step, or no step to keep."""
    if step < 0:
        raise ValueError(f"step must not be negative, got {step}")
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last must be positive, got {keep_last}")


def random_state() -> dict[str, Any]:
    """Return the states, of tensors and plain values only; NumPy's if it has been imported."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": (version, list(words), gauss)}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    if numpy := sys.modules.get("numpy"):
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (name, keys.tolist(), *rest)
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set the states that ``random_state`` returned; those of GPUs and NumPy only where the process uses them."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
