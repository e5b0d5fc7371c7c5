"""Text to train on, one token per byte: the Python sources of this machine, or files of the user."""

from __future__ import annotations

import importlib
import importlib.util
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusco.bench.train.job import TrainingJob

_NOT_SOURCES = ("site-packages", "dist-packages", "test", "tests")
_HELD_OUT_BYTES, _NUM_BYTES = 1 << 18, 256
_FACTOR, _NUM_SEEDS = 1_000_003, 2**63  # PyTorch's generators take no more than 64 bits, with a sign


def load_text(job: TrainingJob) -> torch.Tensor:
    """Read a job's text, uint8 (num_bytes,): its files in order of their paths, the same in every process.

    Raises ``ValueError`` if there is no such text, or less of it than one step of all ranks reads.
    """
    text = _read(job, job.text_bytes)
    if len(text) < job.bytes_per_step:
        where = "the Python sources of this machine have" if job.text is None else f"{job.text} has"
        raise ValueError(
            f"{where} {len(text)} bytes (of at most {job.text_bytes} to be read), and one step of {job.num_ranks} "
            f"ranks with {job.num_sequences} sequences of {job.length} tokens each reads {job.bytes_per_step}"
        )
    return torch.frombuffer(text, dtype=torch.uint8)


@dataclass(frozen=True)
class Corpus:
    """A job's text as tokens: those to train on, and those held out to judge by."""

    train: torch.Tensor  # (num_tokens,)
    held_out: torch.Tensor | None  # likewise; ``None`` if there are too few to hold any out
    tokenizer: Any = None  # of the model's folder; ``None`` for a token per byte

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens."""
        if self.tokenizer:
            return str(self.tokenizer.decode(ids))
        return bytes(each % _NUM_BYTES for each in ids).decode("utf-8", errors="replace")


def load_corpus(job: TrainingJob) -> Corpus:
    """Read a job's text, and hold out what follows ``text_bytes``; of a shorter text, its last twentieth.

    It is tokenized by the tokenizer of the model's folder, if there is one; else a token is a byte. Raises
    ``ValueError`` as ``load_text``.
    """
    load_text(job)
    text, num_bytes = _read(job, job.text_bytes + _HELD_OUT_BYTES), job.text_bytes
    enough = job.length + 1
    if len(text) < num_bytes + enough:
        num_bytes = len(text) - max(len(text) // 20, enough)
        if num_bytes < job.bytes_per_step:
            return Corpus(torch.frombuffer(text, dtype=torch.uint8), None)
    parts = text[:num_bytes], text[num_bytes:]
    if job.model is None or not (job.model / "tokenizer.json").exists():
        train, held_out = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
        return Corpus(train, held_out)
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(job.model)
    train, held_out = (torch.tensor(tokenizer.encode(part.decode(errors="replace")), device="cpu") for part in parts)
    if len(train) < enough:
        raise ValueError(f"the text has {len(train)} tokens, and a sequence {job.length}")
    return Corpus(train, held_out if len(held_out) >= enough else None, tokenizer)


def _read(job: TrainingJob, num_bytes: int) -> bytearray:
    """Read at most so many bytes of a job's files."""
    text = bytearray()
    for path in _python_sources() if job.text is None else _files_of(job.text):
        with path.open("rb") as file:
            text += file.read(num_bytes - len(text))
        if len(text) == num_bytes:
            break
    return text


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
        yield from _sources_in(root)


def _sources_in(folder: Path) -> Iterator[Path]:
    """Yield sources in order, and look into no folder before its turn: the first few are enough text."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and path.name not in _NOT_SOURCES:
            yield from _sources_in(path)
        elif path.suffix == ".py" and path.is_file():
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
