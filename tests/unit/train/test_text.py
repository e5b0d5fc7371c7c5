"""The text to learn: the same in every process, and what is wrong with it is said."""

import dataclasses
import tracemalloc

import pytest
import torch
from test_job import make_job

from fusco.bench.train.text import load_text, make_batch


def test_python_sources_are_the_same_every_time_and_capped():
    text = load_text(make_job(text_bytes=300_000))
    assert text.dtype == torch.uint8
    assert len(text) == 300_000
    assert torch.equal(text, load_text(make_job(text_bytes=300_000)))
    assert b"import" in bytes(text.tolist())


def test_a_directory_is_read_in_order_of_paths_without_hidden_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, content in (
        ("b/z.txt", "3" * 80),
        ("a.txt", "1" * 80),
        ("b/c", "2" * 80),
        (".git/x", "no"),
        (".y", "no"),
    ):
        (tmp_path / name).write_text(content)
    assert bytes(load_text(make_job(text=tmp_path)).tolist()).decode() == "1" * 80 + "2" * 80 + "3" * 80
    assert bytes(load_text(make_job(text=tmp_path, text_bytes=170)).tolist()).decode() == "1" * 80 + "2" * 80 + "3" * 10


def test_no_more_of_a_file_is_read_than_is_wanted(tmp_path):
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(64 << 20)
    job = make_job(text=large, text_bytes=1000)
    tracemalloc.start()
    try:
        assert len(load_text(job)) == 1000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_what_is_wrong_with_a_text_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file or directory .*nowhere to train on"):
        load_text(make_job(text=tmp_path / "nowhere"))
    short = tmp_path / "short"
    short.write_text("x" * 100)
    with pytest.raises(ValueError) as error:  # noqa: PT011  the whole text is compared
        load_text(make_job(text=short))
    assert str(error.value) == (
        f"{short} has 100 bytes (of at most 33554432 to be read), and one step of 4 ranks with 2 sequences of 16 "
        f"tokens each reads 136"
    )


def test_batches_are_runs_of_the_text_chosen_by_seed_step_and_rank():
    job = make_job()
    text = torch.arange(200, dtype=torch.uint8)
    batch = make_batch(text, job, rank=1, step=2)
    assert batch.shape == (2, 17)
    assert batch.dtype == torch.int64
    assert (batch.diff(dim=1) == 1).all()
    assert torch.equal(batch, make_batch(text, job, rank=1, step=2))
    others = [make_batch(text, dataclasses.replace(job, seed=1), 1, 2), make_batch(text, job, 0, 2)]
    assert not any(torch.equal(batch, other) for other in [*others, make_batch(text, job, 1, 3)])
    shortest = torch.arange(17, dtype=torch.uint8)
    assert make_batch(shortest, job, 0, 0).tolist() == [list(range(17))] * 2


@pytest.mark.parametrize("seed", [20240801, 2**31, 2**63, 10**30])
def test_any_seed_will_do(seed):
    text = torch.arange(200, dtype=torch.uint8)
    job = make_job(seed=seed)
    batches = [make_batch(text, job, rank, step) for rank in range(2) for step in range(2)]
    assert torch.equal(batches[0], make_batch(text, job, 0, 0))
    assert not any(torch.equal(batches[0], other) for other in batches[1:])
