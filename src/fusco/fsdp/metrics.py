"""Metrics of training, and where they go: loss, speed, memory, loads of experts, share of dispatch and combine."""

from __future__ import annotations

import csv
import importlib
import json
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from fusco.fsdp.expert_loads import LoadSummary, mark_loads, read_loads, summarize_loads
from fusco.fsdp.layer import layers_of
from fusco.fsdp.mesh import EPMesh
from fusco.fsdp.timed_dispatcher import SECTIONS, TimedDispatcher

_READER = "metrics"
_FLOPS_PER_PRODUCT = 6  # of a parameter and a token: 2 forward, 4 backward
# Dense bfloat16 FLOP/s by name of the GPU, from NVIDIA's data sheets.
_PEAKS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "B200": 2250e12, "A100": 312e12}


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """A step of all ranks; equal on all of them."""

    step: int  # counted from 1
    loss: float  # mean over the tokens of all ranks
    gradient_norm: float | None  # as given
    learning_rate: float | None  # of the optimizer's first group, in this step
    step_ms: float  # of the slowest rank
    tokens_per_s: float  # of all ranks
    mfu: float | None  # model FLOP/s over the GPUs' peak, without attention scores; ``None`` for an unknown peak
    memory_gib: float  # the largest peak of any rank: allocated on its GPU, else resident in main memory
    busiest_expert: float  # rows of the busiest expert over those of the mean expert, mean over layers
    load_cv: float  # coefficient of variation of the experts' rows, mean over layers
    num_idle_experts: int  # without a row, of all layers
    shuffle_share: float | None  # dispatch and combine, forward and backward, of a rank's step, mean over ranks
    # of a rank's step, mean over ranks: the time of dispatch and combine beyond that of the rank that waits least
    waiting_share: float | None
    section_ms: dict[str, float]  # dispatch, combine and their backward passes, means over ranks
    layers: dict[str, LoadSummary]  # by name of the module of experts

    def describe(self) -> str:
        """Describe the step in a line of at most 80 columns."""
        norm = "" if self.gradient_norm is None else f"  norm {self.gradient_norm:.2f}"
        shuffle = "" if self.shuffle_share is None else f"  shuffle {self.shuffle_share:.0%}"
        speed = f"{self.tokens_per_s:,.0f} tokens/s"
        return f"step {self.step}  loss {self.loss:.3f}{norm}  {speed}  busiest {self.busiest_expert:.2f}x{shuffle}"

    def flat(self) -> dict[str, float]:
        """Return all numbers that are known, by names such as ``layers/model.layers.0.mlp.experts/cv``."""
        found: dict[str, float] = {}
        for name, value in asdict(self).items():
            _flatten(name, value, found)
        return found


class MetricWriter(Protocol):
    """Gets the metrics of each step."""

    def write(self, metrics: StepMetrics) -> None:
        """Write a step."""

    def close(self) -> None:
        """Finish what is written."""


class Metrics(AbstractContextManager["Metrics"]):
    """Measures steps of training, and hands each to its writers on rank 0. Use it in a ``with`` block, or ``close``."""

    def __init__(
        self,
        model: nn.Module,
        mesh: EPMesh,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        dispatcher: TimedDispatcher | None = None,
        peak_flops: float | None = None,
        writers: Sequence[MetricWriter] = (),
    ) -> None:
        """Measure a model.

        Args:
            model: parallelized, or distributed by transformers with fusco.
            mesh: from ``build_mesh``.
            optimizer: whose learning rate is shown.
            dispatcher: what the model was parallelized with, to show the share of dispatch and combine.
            peak_flops: FLOP/s of a rank's device, for MFU. ``None`` takes that of the GPU for bfloat16, if known.
            writers: get the metrics of each step, on rank 0.
        """
        self._model, self._mesh, self._optimizer, self._dispatcher = model, mesh, optimizer, dispatcher
        self._peak_flops = peak_flops or _known_peak(mesh.device_type)
        self._writers = list(writers) if dist.get_rank() == 0 else []
        modules = [layer.experts.module for layer in layers_of(model).values()]
        self._dense, self._of_expert = _count_parameters(model, modules)
        self._num_steps = 0
        self.start()

    def start(self, num_done: int | None = None) -> None:
        """Begin a step now, rather than at the end of the one before; ``num_done`` sets how many have been made."""
        self._num_steps = self._num_steps if num_done is None else num_done
        mark_loads(self._model, _READER)
        if self._dispatcher:
            self._dispatcher.clock.take_s(SECTIONS)
        self._rate = float(self._optimizer.param_groups[0]["lr"]) if self._optimizer else None
        self._start = time.perf_counter()

    def step(
        self, loss: float | torch.Tensor, num_tokens: int, gradient_norm: float | torch.Tensor | None = None
    ) -> StepMetrics:
        """End a step, of one or more microbatches; a collective, which waits for the device.

        Args:
            loss: this rank's part of the mean loss, from ``scale_loss``; parts are added.
            num_tokens: of this rank.
            gradient_norm: from ``clip_grad_norm_``.
        """
        local_loss = float(loss.detach()) if isinstance(loss, torch.Tensor) else loss
        if self._mesh.device_type == "cuda":
            torch.cuda.synchronize()
        step_s = time.perf_counter() - self._start
        sections = self._dispatcher.clock.take_s(SECTIONS) if self._dispatcher else dict.fromkeys(SECTIONS, 0.0)
        ranks = self._gather([local_loss, num_tokens, step_s, self._memory_gib(), *sections.values()])
        loads = read_loads(self._model, _READER)
        self._num_steps += 1
        metrics = self._summarize(ranks, loads, None if gradient_norm is None else float(gradient_norm))
        for writer in self._writers:
            writer.write(metrics)
        self.start()
        return metrics

    def close(self) -> None:
        """Close the writers."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _gather(self, values: list[float]) -> torch.Tensor:
        local = torch.tensor(values, dtype=torch.float64, device=self._mesh.device_type)
        gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, local)
        return torch.stack(gathered).cpu()

    def _summarize(self, ranks: torch.Tensor, loads: dict[str, torch.Tensor], norm: float | None) -> StepMetrics:
        loss, tokens, step_s, memory = (ranks[:, i] for i in range(4))
        sections, slowest_s = ranks[:, 4:], float(step_s.max())
        waiting = (sections - sections.min(0).values).sum(1)
        layers = summarize_loads(loads)
        rows = [float(each.sum()) for each in loads.values()]
        products = self._dense * float(tokens.sum()) + sum(a * b for a, b in zip(rows, self._of_expert, strict=True))
        peak = self._peak_flops and self._peak_flops * len(ranks) * slowest_s
        return StepMetrics(
            step=self._num_steps,
            loss=float(loss.sum()),
            gradient_norm=norm,
            learning_rate=self._rate,
            step_ms=slowest_s * 1e3,
            tokens_per_s=float(tokens.sum()) / slowest_s,
            mfu=_FLOPS_PER_PRODUCT * products / peak if peak else None,
            memory_gib=float(memory.max()),
            busiest_expert=fmean(each.busiest for each in layers.values()),
            load_cv=fmean(each.cv for each in layers.values()),
            num_idle_experts=sum(each.num_idle for each in layers.values()),
            shuffle_share=float((sections.sum(1) / step_s).mean()) if self._dispatcher else None,
            waiting_share=float((waiting / step_s).mean()) if self._dispatcher else None,
            section_ms={name: float(sections[:, i].mean()) * 1e3 for i, name in enumerate(SECTIONS)},
            layers=layers,
        )

    def _memory_gib(self) -> float:
        if self._mesh.device_type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB


def _count_parameters(model: nn.Module, experts: Sequence[nn.Module]) -> tuple[int, list[float]]:
    """Return the parameters that every token is multiplied with, and those of one expert of each layer."""
    of_experts = {id(parameter) for module in experts for parameter in module.parameters()}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    embeddings -= {id(parameter) for parameter in head.parameters()} if head is not None else set()
    dense = sum(p.numel() for p in model.parameters() if id(p) not in of_experts | embeddings and p.ndim > 1)
    sizes = [sum(p.numel() / len(p) for p in module.parameters() if p.ndim > 2) for module in experts]
    return dense, sizes


def _known_peak(device_type: str) -> float | None:
    if device_type != "cuda":
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


def _flatten(name: str, value: Any, found: dict[str, float]) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            _flatten(f"{name}/{key}", each, found)
    elif value is not None:
        found[name] = value


class MetricPrinter:
    """Prints a line of at most 80 columns for every so many steps."""

    def __init__(self, every: int = 1) -> None:
        """Print after each ``every`` steps."""
        self._every = every

    def write(self, metrics: StepMetrics) -> None:
        """Print a step if it is due."""
        if metrics.step % self._every == 0:
            sys.stdout.write(f"{metrics.describe()}\n")
            sys.stdout.flush()

    def close(self) -> None:
        """Do nothing."""


class JsonLinesWriter:
    """Appends a JSON object for each step to a file."""

    def __init__(self, path: str | Path) -> None:
        """Append to ``path``, which is made if it is missing."""
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115  closed by ``close``

    def write(self, metrics: StepMetrics) -> None:
        """Write a line."""
        self._file.write(f"{json.dumps(asdict(metrics))}\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class CsvWriter:
    """Writes a row for each step into a new file; columns are those of the first step, as ``StepMetrics.flat``."""

    def __init__(self, path: str | Path) -> None:
        """Write to ``path``, in place of what is there."""
        self._file = Path(path).open("w", encoding="utf-8", newline="")  # noqa: SIM115  closed by ``close``
        self._writer: csv.DictWriter[str] | None = None

    def write(self, metrics: StepMetrics) -> None:
        """Write a row."""
        row = metrics.flat()
        if self._writer is None:
            self._writer = csv.DictWriter(self._file, list(row), extrasaction="ignore")
            self._writer.writeheader()
        self._writer.writerow(row)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardWriter:
    """Writes scalars for TensorBoard; ``ImportError`` without the package tensorboard."""

    def __init__(self, folder: str | Path) -> None:
        """Write event files into ``folder``."""
        self._writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def write(self, metrics: StepMetrics) -> None:
        """Write a scalar for each number."""
        for name, value in metrics.flat().items():
            self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        """Close the event files."""
        self._writer.close()


class WandbWriter:
    """Logs to Weights & Biases; ``ImportError`` without the package wandb."""

    def __init__(self, **options: Any) -> None:
        """Begin a run; ``options`` are those of ``wandb.init``."""
        self._run: Any = importlib.import_module("wandb").init(**options)

    def write(self, metrics: StepMetrics) -> None:
        """Log all numbers."""
        self._run.log(metrics.flat(), step=metrics.step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def open_writer(target: str) -> MetricWriter:
    """Return the writer of a file (.csv or .jsonl), of ``"wandb"``, or else of a folder for TensorBoard."""
    if target == "wandb":
        return WandbWriter()
    suffix = Path(target).suffix
    return CsvWriter(target) if suffix == ".csv" else JsonLinesWriter(target) if suffix else TensorBoardWriter(target)
