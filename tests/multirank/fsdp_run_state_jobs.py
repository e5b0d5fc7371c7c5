"""Functions on ranks, or in a process alone: a run that is saved, killed, continued."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_models import SEQUENCE, VOCABULARY, Batch, loss_sum, make_model, num_targets
from fsdp_runs import Run, dispatcher_of, mesh_of, whole_of
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from fusco import fsdp

NUM_STEPS, SAVED_AFTER = 4, 2


class Loader:
    """Draws batches; its state is a number, as that of a loader of a data set."""

    def __init__(self) -> None:
        self.num_drawn = 0

    def state_dict(self) -> dict[str, Any]:
        return {"num_drawn": self.num_drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_drawn = state_dict["num_drawn"]

    def draw(self, generator: torch.Generator) -> Batch:
        """Return a batch that depends on all random numbers that a run may use."""
        self.num_drawn += 1
        ids = torch.randint(VOCABULARY, (2, SEQUENCE), generator=generator) + self.num_drawn + random.randrange(5)
        ids = (ids + torch.randint(3, ids.shape)) % VOCABULARY
        return Batch(ids, ids)


class Trainer:
    """A model with dropout, and all that a run has."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.train()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.generator, self.loader = torch.Generator().manual_seed(rank), Loader()
        torch.manual_seed(100 + rank)
        random.seed(200 + rank)

    @property
    def state(self) -> fsdp.RunState:
        others = {"generator": self.generator, "loader": self.loader}
        return fsdp.RunState(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, others=others)

    def step(self) -> None:
        batch = self.loader.draw(self.generator)
        (loss_sum(self.model, batch) / num_targets(batch)).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: whole_of(tensor) for name, tensor in self.model.named_parameters()}


@contextlib.contextmanager
def trainer(ep_size: int = 2, **changes: int) -> Iterator[Trainer]:
    mesh = mesh_of(ep_size, 1)
    with dispatcher_of(Run(ep_size=ep_size), mesh) as dispatcher:
        model = make_model("qwen3", attention_dropout=0.3, **changes)
        fsdp.parallelize(model, mesh, dispatcher)
        yield Trainer(model)


def save_and_go_on(_: dist.ProcessGroup, folder: Path, is_async: bool) -> dict[str, torch.Tensor]:
    """Return the weights of a run that goes on after it has been saved."""
    with trainer() as run, contextlib.ExitStack() as opened:
        saver = opened.enter_context(fsdp.AsyncSaver(folder, run.state)) if is_async else None
        for step in range(NUM_STEPS):
            if step == SAVED_AFTER and saver:
                saver.save(step)
            elif step == SAVED_AFTER:
                assert fsdp.save_run(folder, step, run.state) == folder / "step-00000002"
            run.step()
        return run.weights()


def continued(_: dist.ProcessGroup, folder: Path) -> tuple[int, float, dict[str, torch.Tensor]]:
    """Return the step that a run continues at, its learning rate there, and its weights at the end."""
    with trainer() as run:
        for _ in range(3):
            run.step()
        step = fsdp.load_run(folder, run.state)
        rate = run.scheduler.get_last_lr()[0]
        for _ in range(step, NUM_STEPS):
            run.step()
        return step, rate, run.weights()


def errors_of_loading(_: dist.ProcessGroup, folder: Path) -> list[str]:
    """Return what is said of states that are not those of the run."""
    texts = []
    with trainer(ep_size=1) as run:
        whole = run.state
        model, optimizer = whole.model, whole.optimizer
        for where, state in (
            (folder / "nothing", whole),
            (folder, whole),  # which only as many ranks as before have
            (folder, fsdp.RunState(model=model, optimizer=optimizer, others=whole.others)),
            (folder, fsdp.RunState(model=model, optimizer=optimizer, scheduler=whole.scheduler)),
        ):
            try:
                fsdp.load_run(where, state)
            except (ValueError, OSError) as error:
                texts.append(str(error))
        if dist.get_rank() == 1:
            whole.others["loader"].num_drawn = texts.append  # no value that a file can have
        try:
            fsdp.save_run(folder, 5, whole)
        except ValueError as error:
            texts.append(str(error))
    return texts


def save_steps(_: dist.ProcessGroup, folder: Path, steps: list[int], keep_last: int | None) -> list[list[str]]:
    """Return the steps that are there after each save."""
    found = []
    with trainer() as run:
        for step in steps:
            fsdp.save_run(folder, step, run.state, keep_last=keep_last)
            found.append([*sorted(path.name for path in folder.glob("step-*")), fsdp.latest_run(folder).name])
    return found


def time_of_save(_: dist.ProcessGroup, folder: Path) -> float:
    """Return the seconds of the second save."""
    with trainer(num_hidden_layers=1) as run:
        for step in (1, 2):
            start = time.perf_counter()
            fsdp.save_run(folder, step, run.state)
        return time.perf_counter() - start


def be_killed_in_save(_: dist.ProcessGroup, folder: Path, rank: int, after_s: float) -> None:
    """Save step 1, then step 2; one rank is killed meanwhile."""
    with trainer(num_hidden_layers=1) as run:
        for step in (1, 2):
            run.step()
            weights = run.weights()
            if dist.get_rank() == 0:
                torch.save(weights, folder.with_name(f"weights-{step}.pt"))
            dist.barrier()
            if step == 2 and dist.get_rank() == rank:
                threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            fsdp.save_run(folder, step, run.state, keep_last=1)
        time.sleep(2 * after_s + 1)  # the save may have been faster than the one that was timed
