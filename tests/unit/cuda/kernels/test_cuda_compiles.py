"""Every CUDA kernel compiles for every architecture, which needs no GPU."""

from __future__ import annotations

import ctypes
import re
from itertools import cycle

import pytest
from kernel_constants import GRID, ITEM_BYTES, NUM_RANKS, SMALLEST, Constants

from fusco.core.errors import CompileError
from fusco.cuda.kernels.comm import BadPair, Failure, Report
from fusco.cuda.kernels.compiler import SOURCE_DIR, Compiler
from fusco.cuda.memory.layout import MAX_PAYLOADS

pytest.importorskip("cuda.core", reason="compiling kernels needs cuda-core, which fusco[cuda] and fusco[test] install")
from cuda.bindings import nvrtc

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
ELF = b"\x7fELF"
CASES = [(name, constants) for name, grid in GRID.items() for constants in grid]


def describe(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key.lower()}={entry}" for key, entry in value.items() if key != "ARGUMENT_BYTES")
    return str(value)


@pytest.mark.parametrize(
    ("name", "constants", "arch"),
    [
        (name, constants, arch)
        for name, grid in GRID.items()
        for constants, arch, _ in zip(cycle(grid), cycle(ARCHITECTURES), range(max(3, len(grid))))
    ],
    ids=describe,
)
def test_compiles(name, constants, arch, folder):
    """A kernel for every architecture, and each of its constants for one of them."""
    assert Compiler(arch, folder).compile(name, constants).startswith(ELF)


def ptx_of(name: str, constants: Constants) -> str:
    """By NVRTC itself: for PTX, cuda-core asks the driver what it can read."""
    source = (SOURCE_DIR / f"{name}.cu").read_bytes()
    error, program = nvrtc.nvrtcCreateProgram(source, f"{name}.cu".encode(), 0, [], [])
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
    options = ["--std=c++17", "--gpu-architecture=compute_90", f"--include-path={SOURCE_DIR}"]
    options += [f"--define-macro={key}={value}" for key, value in constants.items()]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = bytes(size)
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    return ptx.decode()


SUMS = {(name, of["ROW_TYPE"]): of for name, of in CASES if "HIDDEN" in of and of.get("HAS_DOTS", 1)}


@pytest.mark.parametrize(("name", "constants"), [(name, of) for (name, _), of in SUMS.items()], ids=describe)
def test_products_and_sums_are_rounded_separately(name, constants):
    """As on the CPU: an instruction that does both at once would be the compiler's choice."""
    ptx = ptx_of(name, constants)
    assert re.search(r"\badd(\.rn)?\.f(32|64)\b", ptx)
    assert "fma." not in ptx


def test_the_grid_covers_every_kernel():
    assert set(GRID) == {path.stem for path in SOURCE_DIR.glob("*.cu")}


def test_the_grid_covers_every_kind_of_constants():
    def seen(kernel: str, constant: str) -> set[object]:
        return {constants[constant] for constants in GRID[kernel]}

    for kernel in ("plan", "scatter_rows", "combine_rows"):
        assert seen(kernel, "NUM_RANKS") == set(NUM_RANKS), kernel
    for kernel in ("plan", "scatter_rows", "combine_rows"):
        assert seen(kernel, "NUM_TOPK") == {1, 8, 32}, kernel
    for kernel in ("plan", "combine_rows"):
        assert seen(kernel, "WEIGHT_BYTES") == {0, 4, 8}, kernel
    assert seen("plan", "ID_BYTES") == {4, 8}
    assert seen("combine_rows", "ROW_TYPE") == seen("combine_rows", "WIRE_TYPE") == set(ITEM_BYTES)
    assert seen("combine_rows", "VECTOR_ELEMENTS") == {1, 2, 4, 8}
    assert seen("scatter_rows", "NUM_PAYLOADS") == {1, 2, MAX_PAYLOADS}
    widths = {width for listing in seen("scatter_rows", "VECTOR_BYTES") for width in str(listing).split(",")}
    assert widths == {"1", "2", "4", "8", "16"}


def test_a_struct_of_another_size_does_not_compile(tmp_path):
    with pytest.raises(
        CompileError, match=r"copy_segments does not compile for sm_90 .*ARGUMENT_BYTES=48(.|\n)*mirrors"
    ):
        Compiler("sm_90", tmp_path).compile("copy_segments", {**SMALLEST, "ARGUMENT_BYTES": 48})


@pytest.mark.parametrize(("struct", "source"), [(Report, "plan.cu"), (BadPair, "plan.cu"), (Failure, "comm.cuh")])
def test_words_in_host_memory_stand_where_the_source_says(struct, source):
    """No kernel takes these by value, so that no size is checked when it is compiled."""
    text = (SOURCE_DIR / source).read_text()
    body = re.sub(r"//.*", "", text.split(f"struct {struct.__name__} {{", 1)[1].split("};", 1)[0])
    types = {"u32": ctypes.c_uint32, "i32": ctypes.c_int32, "BadPair": BadPair}
    declared = [
        (name.strip(), types[kind])
        for kind, names in re.findall(r"(u32|i32|BadPair) ([^;]+);", body)
        for name in names.split(",")
    ]
    assert declared == list(struct._fields_)
