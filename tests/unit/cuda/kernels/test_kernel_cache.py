"""Compiled CUDA kernels are kept on disk, by everything that they depend on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernel_constants import SMALLEST, combine_rows, plan, scatter_rows, weight_gradients

from fusco.core.errors import CompileError
from fusco.cuda.kernels import compiler
from fusco.cuda.kernels.compiler import Compiler
from fusco.cuda.kernels.warm_up import KernelShape, warm_up_cuda
from fusco.cuda.tuning import are_streamed, plan_shape, pushes_early

pytest.importorskip("cuda.core", reason="compiling kernels needs cuda-core, which fusco[cuda] and fusco[test] install")


class Counting(Compiler):
    """A compiler that makes something up, and counts how often."""

    num_compiled = 0

    def _compile(self, name: str, constants: object) -> bytes:
        self.num_compiled += 1
        return f"{name} for {self.arch} with {constants}".encode()


def test_what_is_compiled_is_kept_for_the_next_process(tmp_path, monkeypatch):
    cubin = Compiler("sm_90", tmp_path).compile("copy_segments", SMALLEST)

    def refuse(*_: object) -> bytes:
        raise AssertionError("compiled again")

    monkeypatch.setattr(Compiler, "_compile", refuse)
    assert Compiler("sm_90", tmp_path).compile("copy_segments", SMALLEST) == cubin
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [cubin]


def test_another_kernel_constant_or_architecture_is_compiled_anew(tmp_path):
    first, other = Counting("sm_90", tmp_path), Counting("sm_80", tmp_path)
    cubins = [
        first.compile("a", {"X": 1}),
        first.compile("a", {"X": 2}),
        first.compile("a", {"Y": 1}),
        first.compile("b", {"X": 1}),
        other.compile("a", {"X": 1}),
    ]
    assert len(set(cubins)) == 5
    assert (first.num_compiled, other.num_compiled) == (4, 1)
    again = Counting("sm_90", tmp_path)
    assert again.compile("a", {"Y": 1}) == cubins[2]
    assert again.num_compiled == 0


def test_the_order_of_constants_does_not_matter(tmp_path):
    counting = Counting("sm_90", tmp_path)
    assert counting.compile("a", {"X": 1, "Y": 2}) == counting.compile("a", {"Y": 2, "X": 1})
    assert counting.num_compiled == 1


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder of its own for sources."""
    folder = tmp_path / "source"
    folder.mkdir()
    monkeypatch.setattr(compiler, "SOURCE_DIR", folder)
    compiler._sources.cache_clear()
    yield folder
    compiler._sources.cache_clear()


def test_another_source_is_compiled_anew(tmp_path, sources):
    counting = Counting("sm_90", tmp_path / "cache")
    for text in ("// one", "// two"):
        (sources / "included.cuh").write_text(text)
        compiler._sources.cache_clear()
        counting.compile("a", {})
    assert counting.num_compiled == 2


def test_a_broken_source_raises_the_compilers_words(tmp_path, sources):
    (sources / "broken.cu").write_text('extern "C" __global__ void broken() { nowhere = WIDTH; }')
    with pytest.raises(CompileError) as raised:
        Compiler("sm_90", tmp_path / "cache").compile("broken", {"WIDTH": 7})
    for words in ("kernel broken does not compile for sm_90 with WIDTH=7", 'identifier "nowhere" is undefined'):
        assert words in str(raised.value)
    assert not (tmp_path / "cache").exists()


def test_no_process_sees_a_partial_file(tmp_path, monkeypatch):
    cubin, replace = b"x" * 1000, Path.replace
    seen = []

    def look_and_replace(self: Path, target: Path) -> Path:
        seen.append((list(tmp_path.glob("[!.]*.cubin")), self.read_bytes(), self.parent == target.parent))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", look_and_replace)
    monkeypatch.setattr(Compiler, "_compile", lambda *_: cubin)
    Compiler("sm_90", tmp_path).compile("copy_segments", SMALLEST)
    # Up to the moment in which it gets its name it is elsewhere, and complete then.
    assert seen == [([], cubin, True)]
    assert [path.suffix for path in tmp_path.iterdir()] == [".cubin"]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_: object) -> Path:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.warns(UserWarning, match="no space left on device"):
        assert Counting("sm_90", tmp_path).compile("a", {}).startswith(b"a for sm_90")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_warned_of_once(tmp_path):
    # Not by permissions, which do not stop the superuser.
    (tmp_path / "file").touch()
    counting = Counting("sm_90", tmp_path / "file" / "cache")
    with pytest.warns(UserWarning, match=r"cannot be kept in .*file/cache.*Set FUSCO_CACHE_DIR") as warned:
        cubins = [counting.compile("a", {"X": x}) for x in range(3)]
    assert len(warned) == 1
    assert len(set(cubins)) == counting.num_compiled == 3


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSCO_CACHE_DIR", str(tmp_path / "chosen"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Counting("sm_90").compile("a", {})
    assert len(list((tmp_path / "chosen").glob("a-*.cubin"))) == 1
    monkeypatch.delenv("FUSCO_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    Counting("sm_90").compile("a", {})
    assert len(list((tmp_path / "user" / "fusco").glob("a-*.cubin"))) == 1


def test_without_a_folder_that_can_be_written_a_private_one_is_used(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSCO_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.warns(UserWarning, match=rf"cannot be kept in .*file/cache .*kept in {tmp_path}/fusco-\d+ until"):
        Counting("sm_90").compile("a", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = Counting("sm_90")
        again.compile("a", {})
    assert again.num_compiled == 0


def test_warming_up_compiles_what_calls_of_any_size_launch(tmp_path):
    counting = Counting("sm_90", tmp_path)
    names = warm_up_cuda(counting, KernelShape(num_ranks=8, num_topk=8, hidden=7168, dtype=torch.bfloat16))
    assert set(names) == {"plan", "scatter_rows", "combine_rows", "weight_gradients"}
    num_compiled = counting.num_compiled
    # What launches of 1, 128, 512, 1024 and 8192 tokens on each rank ask for is there: the very constants of the grid.
    needed = [("weight_gradients", weight_gradients(7168, "BF16", 4, 1))]
    for num_tokens in (1, 128, 512, 1024, 8192):
        num_rows = 8 * num_tokens
        of_plan = plan(8, 1, 8, 8, 4, num_threads=plan_shape(8 * num_rows)[0])
        kind = {"is_streamed": int(are_streamed(8 * num_tokens, 14336)), "is_early": int(pushes_early(num_rows))}
        needed += [("plan", of_plan), ("scatter_rows", scatter_rows(8, 8, 14336, **kind))]
        needed += [("combine_rows", combine_rows(8, 8, 7168, "BF16", "BF16", w, num_rows=num_rows)) for w in (0, 4)]
    for name, constants in needed:
        counting.compile(name, constants)
        assert counting.num_compiled == num_compiled, (name, constants)
