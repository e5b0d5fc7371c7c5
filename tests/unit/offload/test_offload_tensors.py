"""Mistakes of callers are sentences with both values; C sources compile once."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given, strategies as st

from fusco.core import c_library
from fusco.core.c_library import compile_c, load_c_library, sources_of
from fusco.core.errors import CompileError
from fusco.offload import copier as copier_module, copy_from_host, copy_to_host
from fusco.offload.mover import Job, Options, PathStreams
from fusco.offload.settings import MB, RelayBudget


def tensor_like(device="cuda:0", dtype=torch.float32, shape=(4, 4), *, pinned=False, contiguous=True):
    """A tensor as a caller might pass it; there is no GPU here."""
    made = mock.Mock(spec=torch.Tensor, device=torch.device(device), dtype=dtype, shape=torch.Size(shape))
    made.is_pinned.return_value, made.is_contiguous.return_value = pinned, contiguous
    made.stride.return_value = (1, 4)
    made.numel.return_value, made.element_size.return_value = 16, 4
    return made


GOOD, PINNED = tensor_like(), tensor_like("cpu", pinned=True)


@pytest.mark.parametrize(
    ("tensor", "pinned", "error", "text"),
    [
        ([1.0], PINNED, TypeError, "tensor must be a torch.Tensor, got list"),
        (GOOD, None, TypeError, "pinned must be a torch.Tensor, got NoneType"),
        (torch.ones(4), PINNED, ValueError, "tensor must be on a CUDA device, got cpu"),
        (GOOD, GOOD, ValueError, "pinned must be a CPU tensor in pinned memory, got one on cuda:0"),
        (GOOD, tensor_like("cpu"), ValueError, r"pinned must be in pinned memory; .* got \(4, 4\) pageable"),
        (
            GOOD,
            tensor_like("cpu", torch.float16, pinned=True),
            ValueError,
            "one dtype, got torch.float32 and torch.float16",
        ),
        (GOOD, tensor_like("cpu", shape=(16,), pinned=True), ValueError, r"one shape, got .*4, 4.* and .*16"),
        (
            tensor_like(contiguous=False),
            PINNED,
            ValueError,
            r"tensor must be contiguous, got shape \(4, 4\) and strides",
        ),
        (GOOD, tensor_like("cpu", pinned=True, contiguous=False), ValueError, "pinned must be contiguous"),
    ],
)
def test_mistakes(tensor, pinned, error, text):
    for copy in (copy_to_host, copy_from_host):
        with pytest.raises(error, match=text):
            copy(tensor, pinned)


def test_a_copier_of_another_gpu():
    with pytest.raises(ValueError, match="tensor is on cuda:0, but the copier is that of cuda:1"):
        copy_to_host(GOOD, PINNED, copier=mock.Mock(device=1))


@pytest.fixture
def capturing(monkeypatch):
    """The GPUs whose current streams are captured; GPU 0 is current."""
    capturing, current = set(), [0]

    @contextmanager
    def change(device):
        current.append(device.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", change)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] in capturing)
    return capturing


def test_in_a_capture(capturing):
    capturing.add(1)
    copy_to_host(GOOD, PINNED, copier=mock.Mock(device=0))
    with pytest.raises(RuntimeError, match="cannot be captured into a CUDA graph"):
        copy_to_host(tensor_like("cuda:1"), PINNED)


def test_addresses_and_bytes_reach_the_copier(capturing):
    GOOD.data_ptr.return_value, PINNED.data_ptr.return_value = 1000, 2000
    copier = mock.Mock(device=0)
    copy_from_host(GOOD, PINNED, copier=copier)
    with mock.patch.object(copier_module, "copier_of", return_value=copier) as copier_of:
        copy_to_host(GOOD, PINNED)
    copier_of.assert_called_once_with(torch.device("cuda:0"))
    assert [call.args for call in copier.copy.call_args_list] == [(1, 1000, 2000, 64), (0, 1000, 2000, 64)]


def test_structs_are_as_large_as_in_c(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSCO_CACHE_DIR", str(tmp_path))  # its name does not depend on what it includes
    source = tmp_path / "sizes.c"
    text = "int64_t sizes(int i) { return i == 0 ? sizeof(Options) : i == 1 ? sizeof(Streams) : sizeof(Job); }"
    mover, *others = sources_of("libfusco-mover")
    source.write_text(f'#include "{mover}"\n{text}\n')
    sizes = load_c_library("sizes", source, *others).sizes
    assert [sizes(i) for i in range(3)] == [ctypes.sizeof(each) for each in (Options, PathStreams, Job)]


def test_a_source_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSCO_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }")
    assert load_c_library(source.stem, source).one() == 1
    assert [path.name[:4] for path in (tmp_path / "cache").iterdir()] == ["one-"]
    load_c_library.cache_clear()
    monkeypatch.setattr(c_library, "_COMPILERS", ())
    monkeypatch.delenv("CC", raising=False)
    assert load_c_library(source.stem, source).one() == 1
    source.write_text("int one(void) { return 2; }")
    load_c_library.cache_clear()
    with pytest.raises(CompileError, match=r"one needs a C compiler, and none of  is installed"):
        load_c_library(source.stem, source)


def test_a_wheel_has_its_libraries_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(c_library, "_COMPILERS", ())
    (tmp_path / "one.c").write_text("int one(void) { return 1; }")
    (tmp_path / "libone.so").write_bytes(b"compiled")
    assert compile_c("libone", [tmp_path / "one.c"]) == tmp_path / "libone.so"
    for name in c_library.LIBRARIES:
        assert len(sources_of(name)) > 2


def test_a_source_that_does_not_compile(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSCO_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "wrong.c"
    source.write_text("int one(void) { return 1 }")
    with pytest.raises(CompileError, match=r"(?s)wrong does not compile with .*expected"):
        load_c_library(source.stem, source)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_library_that_the_system_does_not_load(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSCO_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "two.c"
    source.write_text("int two(void) { return 2; }")
    compile_c("two", [source]).write_bytes(b"no library")
    with pytest.raises(CompileError, match=r"two-.*\.so was compiled but cannot be loaded: .*set FUSCO_CACHE_DIR"):
        load_c_library(source.stem, source)


@given(st.integers(0, 10_000), st.integers(0, 2000))
def test_a_budget_takes_no_more_than_it_may_and_nothing_that_it_would_give_back(free_mb, wanted_mb):
    budget = RelayBudget()
    if not budget.why_not(free_mb * MB, wanted_mb * MB):
        assert wanted_mb * MB <= budget.max_bytes
        assert budget.decide((free_mb - wanted_mb) * MB, wanted_mb * MB) == "keep"
    assert budget.decide(budget.low_bytes - 1, wanted_mb * MB) == "give back"
