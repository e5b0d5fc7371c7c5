"""Text to train on, one token per byte: the Python sources of this machine, or files of the user."""

from __future__ import annotations

import importlib.util
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

from fusco.train.job import TrainingJob

_NOT_SOURCES = ("site-packages", "dist-packages", "test", "tests")
_FACTOR, _NUM_SEEDS = 1_000_003, 2**63  # PyTorch's generators take no more than 64 bits, with a sign


def load_text(job: TrainingJob) -> torch.Tensor:
    """Read a job's text, uint8 (num_bytes,): its files in order of their paths, the same in every process.

    Raises ``ValueError`` if there is no such text, or less of it than one step of all ranks reads.
    """
    text = bytearray()
    for path in _python_sources() if job.text is None else _files_of(job.text):
        with path.open("rb") as file:
            text += file.read(job.text_bytes - len(text))
        if len(text) == job.text_bytes:
            break
    if len(text) < job.bytes_per_step:
        where = "the Python sources of this machine have" if job.text is None else f"{job.text} has"
        raise ValueError(
            f"{where} {len(text)} bytes (of at most {job.text_bytes} to be read), and one step of {job.num_ranks} "
            f"ranks with {job.num_sequences} sequences of {job.length} tokens each reads {job.bytes_per_step}"
        )
    return torch.frombuffer(text, dtype=torch.uint8)


def make_batch(text: torch.Tensor, job: TrainingJob, rank: int, step: int) -> torch.Tensor:
    """Return a rank's sequences in a step, int64 (num_sequences, length + 1), at offsets of (seed, step, rank)."""
    generator = torch.Generator().manual_seed(mix_seed(job.seed, step, rank))
    first = torch.randint(len(text) - job.length, (job.num_sequences, 1), generator=generator, device="cpu")
    return text[first + torch.arange(job.length + 1, device="cpu")].long()


def mix_seed(*numbers: int) -> int:
    """Return a seed for a generator from numbers of any size; it is unique for up to three below a million.

    >>> mix_seed(0, 2, 1)
    2000007
    >>> mix_seed(2**31, 2, 1) < 2**63
    True
    """
    mixed = 0
    for number in numbers:
        mixed = mixed * _FACTOR + number
    return mixed % _NUM_SEEDS


def _python_sources() -> Iterator[Path]:
    """Yield the standard library's files, then those of torch, without tests."""
    torch_package = importlib.util.find_spec("torch")
    assert torch_package is not None
    assert torch_package.origin is not None
    for root in (Path(sysconfig.get_path("stdlib")), Path(torch_package.origin).parent):
        for path in sorted(root.rglob("*.py")):
            if not set(path.relative_to(root).parts).intersection(_NOT_SOURCES):
                yield path


def _files_of(text: Path) -> Iterator[Path]:
    """Yield a file, or the files of a directory, without hidden ones."""
    if text.is_file():
        yield text
        return
    if not text.is_dir():
        raise ValueError(f"there is no file or directory {text} to train on")
    for path in sorted(text.rglob("*")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(text).parts):
            yield path
