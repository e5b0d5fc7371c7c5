"""Where metrics go: the terminal, JSON lines, CSV, TensorBoard, Weights & Biases."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fusco.fsdp.metrics import MetricWriter, StepMetrics


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
