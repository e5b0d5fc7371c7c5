"""Every CUDA kernel compiles for every architecture, which needs no GPU; and what is compiled is kept."""

from __future__ import annotations

import ctypes
import itertools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from fusco.core.errors import CompileError
from fusco.cuda.kernels import compiler
from fusco.cuda.kernels.abi import CHUNK_PAIRS, MAX_PARTS, vector_bytes
from fusco.cuda.kernels.add_returned import returned_type
from fusco.cuda.kernels.combine_rows import combine_type, fitting_ring
from fusco.cuda.kernels.comm import BadPair, Failure, Report
from fusco.cuda.kernels.compiler import SOURCE_DIR, Compiler
from fusco.cuda.kernels.copy_segments import CopyArgs
from fusco.cuda.kernels.gather_rows import gather_type
from fusco.cuda.kernels.node_barrier import barrier_type
from fusco.cuda.kernels.plan import plan_type
from fusco.cuda.kernels.plan_forwarding import ForwardingArgs
from fusco.cuda.kernels.scatter_rows import scatter_type
from fusco.cuda.kernels.warm_up import KernelShape, warm_up_cuda
from fusco.cuda.kernels.weight_gradients import WeightArgs
from fusco.cuda.kernels.weighted_sum import WeightedSumArgs
from fusco.cuda.layout import MAX_PAYLOADS
from fusco.cuda.tuning import combine_shape
from fusco.offload.driver import COPY_CHUNK

pytest.importorskip("cuda.core", reason="compiling kernels needs cuda-core, which fusco[cuda] and fusco[test] install")
from cuda.bindings import nvrtc

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
NUM_RANKS = (1, 2, 4, 8)
ELF = b"\x7fELF"
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}

Constants: TypeAlias = dict[str, object]


def constants_of(struct: type[ctypes.Structure], num_ranks: int, num_threads: int, **others: object) -> Constants:
    sizes = {"ARGUMENT_BYTES": ctypes.sizeof(struct), "NUM_THREADS": num_threads}
    return {**sizes, "NUM_RANKS": num_ranks, "MAX_PARTS": MAX_PARTS, **others}


def plan(
    num_ranks: int, num_nodes: int, num_topk: int, id_bytes: int, weight_bytes: int, num_threads: int = 512
) -> Constants:
    return constants_of(
        plan_type(num_ranks, num_nodes),
        num_ranks,
        num_threads,
        NUM_NODES=num_nodes,
        NUM_TOPK=num_topk,
        ID_BYTES=id_bytes,
        WEIGHT_BYTES=weight_bytes,
        CHUNK_PAIRS=CHUNK_PAIRS,
    )


def scatter_rows(num_ranks: int, num_topk: int, *row_bytes: int, is_early: int = 0) -> Constants:
    return constants_of(
        scatter_type(num_ranks, len(row_bytes)),
        num_ranks,
        512,
        NUM_TOPK=num_topk,
        NUM_PAYLOADS=len(row_bytes),
        PAYLOAD_BYTES=",".join(map(str, row_bytes)),
        VECTOR_BYTES=",".join(str(vector_bytes(size)) for size in row_bytes),
        UNROLL=8,
        IS_EARLY=is_early,
    )


def combine_rows(
    num_ranks: int,
    num_topk: int,
    hidden: int,
    row_type: str,
    wire_type: str,
    weight_bytes: int,
    out_type: str | None = None,
) -> Constants:
    item_bytes, wire_bytes = ITEM_BYTES[row_type], ITEM_BYTES[wire_type]
    vectors_per_lane = -(-hidden * item_bytes // (vector_bytes(hidden * item_bytes) * 32))
    shape = fitting_ring(combine_shape(1, vectors_per_lane, 132), 227 << 10, item_bytes, wire_bytes)
    return constants_of(
        combine_type(num_ranks),
        num_ranks,
        shape.num_threads,
        NUM_TOPK=num_topk,
        HIDDEN=hidden,
        ROW_TYPE=row_type,
        WIRE_TYPE=wire_type,
        OUT_TYPE=out_type or row_type,
        WEIGHT_BYTES=weight_bytes,
        VECTOR_ELEMENTS=vector_bytes(hidden * item_bytes) // item_bytes,
        BLOCKS_PER_SM=shape.blocks_per_sm,
        UNROLL=shape.unroll,
        DEPTH=shape.depth,
    )


def gather_rows(num_messages: int, row_bytes: int) -> Constants:
    sizes = {"ROW_BYTES": row_bytes, "VECTOR_BYTES": vector_bytes(row_bytes)}
    return constants_of(gather_type(num_messages), 1, 512, NUM_MESSAGES=num_messages, **sizes)


def weight_gradients(hidden: int, row_type: str, weight_bytes: int, has_dots: int) -> Constants:
    item_bytes = ITEM_BYTES[row_type]
    return {
        "ARGUMENT_BYTES": ctypes.sizeof(WeightArgs),
        "NUM_THREADS": 256,
        "HIDDEN": hidden,
        "ROW_TYPE": row_type,
        "WEIGHT_BYTES": weight_bytes,
        "HAS_DOTS": has_dots,
        "VECTOR_ELEMENTS": vector_bytes(hidden * item_bytes) // item_bytes,
    }


def weighted_sum(num_topk: int, hidden: int, row_type: str) -> Constants:
    item_bytes = ITEM_BYTES[row_type]
    return {
        "ARGUMENT_BYTES": ctypes.sizeof(WeightedSumArgs),
        "NUM_THREADS": 256,
        "HIDDEN": hidden,
        "NUM_TOPK": num_topk,
        "ROW_TYPE": row_type,
        "VECTOR_ELEMENTS": vector_bytes(hidden * item_bytes) // item_bytes,
    }


def add_returned(num_remote: int, hidden: int, row_type: str, wire_type: str) -> Constants:
    item_bytes = ITEM_BYTES[row_type]
    return constants_of(
        returned_type(1, num_remote),
        1,
        256,
        NUM_REMOTE=num_remote,
        HIDDEN=hidden,
        ROW_TYPE=row_type,
        WIRE_TYPE=wire_type,
        VECTOR_ELEMENTS=vector_bytes(hidden * item_bytes) // item_bytes,
    )


GRID: dict[str, list[Constants]] = {
    "plan": [
        plan(num_ranks, num_nodes, num_topk, id_bytes, weight_bytes)
        for (num_ranks, num_nodes, num_topk), (id_bytes, weight_bytes) in zip(
            # All ranks and all topk, all ids with all weights; not each with each.
            itertools.cycle([(1, 1, 1), (2, 2, 8), (4, 1, 32), (8, 4, 8), (8, 1, 32), (1, 4, 8)]),
            itertools.product((4, 8), (0, 4, 8)),
            strict=False,
        )
    ],
    "scatter_rows": [
        scatter_rows(8, 8, 14336),
        scatter_rows(8, 8, 14336, is_early=1),
        scatter_rows(1, 1, 8, is_early=1),
        scatter_rows(8, 8, 7168, 224, is_early=1),
        scatter_rows(2, 32, 12),
        scatter_rows(4, 8, 6),
        scatter_rows(8, 32, 1001),
        scatter_rows(8, 8, 7168, 224),
        scatter_rows(1, 8, 17, 3),
        scatter_rows(4, 1, *(7168, 224, 8, 4, 2, 1, 1001, 36)),
    ],
    "combine_rows": [
        combine_rows(8, 8, 7168, "BF16", "BF16", 4),
        combine_rows(8, 8, 7168, "BF16", "F32", 4),
        combine_rows(1, 1, 7168, "F16", "F16", 0),
        combine_rows(2, 32, 2048, "F16", "F32", 8),
        combine_rows(4, 8, 4096, "F32", "F32", 0),
        combine_rows(8, 32, 2048, "F64", "F64", 8),
        # Odd widths: vectors of one element of every dtype, then of two and of four.
        combine_rows(8, 8, 17, "BF16", "BF16", 4),
        combine_rows(2, 8, 1, "BF16", "F32", 4),
        combine_rows(4, 8, 3, "F16", "F16", 0),
        combine_rows(2, 1, 5, "F32", "F32", 8),
        combine_rows(1, 8, 33, "F64", "F64", 4),
        combine_rows(8, 8, 34, "F16", "F32", 4),
        combine_rows(4, 8, 1004, "BF16", "BF16", 4),
        # Between nodes: sums in the wire's dtype that go on, and sums of this node.
        combine_rows(2, 8, 7168, "BF16", "F32", 4, "F32"),
        combine_rows(4, 8, 2880, "F16", "F16", 0, "F32"),
    ],
    "plan_forwarding": [
        constants_of(ForwardingArgs, 1, 1024, NUM_TOPK=num_topk, ID_BYTES=id_bytes, WEIGHT_BYTES=weight_bytes)
        for num_topk, id_bytes, weight_bytes in ((1, 4, 0), (8, 8, 4), (32, 4, 8))
    ],
    "gather_rows": [gather_rows(*sizes) for sizes in ((1, 14336), (7, 1001), (63, 6), (3, 8), (1, 36))],
    "add_returned": [
        add_returned(1, 7168, "BF16", "BF16"),
        add_returned(3, 2880, "F16", "F32"),
        add_returned(7, 33, "F32", "F32"),
        add_returned(1, 5, "F64", "F64"),
        add_returned(2, 3, "BF16", "BF16"),
    ],
    "weight_gradients": [
        weight_gradients(7168, "BF16", 4, 1),
        weight_gradients(2880, "F16", 8, 1),
        weight_gradients(33, "F32", 4, 0),
        weight_gradients(5, "F64", 8, 1),
        weight_gradients(3, "BF16", 4, 0),
    ],
    "weighted_sum": [
        weighted_sum(8, 7168, "BF16"),
        weighted_sum(1, 2880, "F16"),
        weighted_sum(11, 33, "F32"),
        weighted_sum(2, 5, "F64"),
    ],
    "node_barrier": [constants_of(barrier_type(num_ranks), num_ranks, 32) for num_ranks in (1, 8)],
    "copy_segments": [constants_of(CopyArgs, num_ranks, 256) for num_ranks in (1, 8)],
    "copy_chunk": [COPY_CHUNK],
}
CASES = [(name, constants) for name, grid in GRID.items() for constants in grid]
SMALLEST = GRID["copy_segments"][0]


def describe(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key.lower()}={entry}" for key, entry in value.items() if key != "ARGUMENT_BYTES")
    return str(value)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("name", "constants"), CASES, ids=describe)
def test_compiles(name, constants, arch, tmp_path):
    assert Compiler(arch, tmp_path).compile(name, constants).startswith(ELF)


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


@pytest.mark.parametrize(
    ("name", "constants"),
    [(name, of) for name, of in CASES if "HIDDEN" in of and of.get("HAS_DOTS", 1)],
    ids=describe,
)
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
        seen.append((list(tmp_path.glob("*.cubin")), self.read_bytes(), self.parent == target.parent))
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


def test_warming_up_compiles_what_dispatch_and_combine_launch(tmp_path):
    counting = Counting("sm_90", tmp_path)
    names = warm_up_cuda(counting, KernelShape(num_ranks=8, num_topk=8, hidden=7168, dtype=torch.bfloat16))
    assert set(names) == {"plan", "scatter_rows", "combine_rows", "weight_gradients"}
    assert counting.num_compiled == len(list(tmp_path.glob("*.cubin"))) == len(names)
    # What a launch asks for is there: the very constants of the grid above.
    for name, constants in (
        ("scatter_rows", scatter_rows(8, 8, 14336)),
        ("combine_rows", combine_rows(8, 8, 7168, "BF16", "BF16", 4)),
        ("plan", plan(8, 1, 8, 8, 4, num_threads=1024)),
        ("weight_gradients", weight_gradients(7168, "BF16", 4, 1)),
    ):
        counting.compile(name, constants)
        assert counting.num_compiled == len(names), name
