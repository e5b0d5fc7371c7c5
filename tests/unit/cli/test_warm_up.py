"""``fusco warm-up``: what it compiles, and that nothing is left to compile."""

import os
import re
import subprocess
import sys

import pytest
from command_line import ROOT, run


def test_warm_up_compiles_for_the_architectures_it_is_given(monkeypatch):
    pytest.importorskip("cuda.core", reason="compiling kernels needs cuda-core")
    compiled = []
    monkeypatch.setattr(
        "fusco.cuda.kernels.warm_up.warm_up_cuda", lambda compiler, shape: compiled.append((compiler.arch, shape)) or []
    )
    done = run("warm-up", "--arch", "sm_90,sm_100", "--hidden", "2048", "--dtype", "float16")
    assert done.exit_code == 0, done.output
    assert "CPU kernels: " in done.output
    assert "kept in" in done.output
    assert [arch for arch, _ in compiled] == ["sm_90", "sm_100"]
    assert str(compiled[0][1]) == "KernelShape(num_ranks=8, num_topk=8, hidden=2048, dtype=torch.float16)"
    assert "'hopper' is not an architecture such as sm_90" in str(run("warm-up", "--arch", "hopper").exception)


def test_warm_up_leaves_no_cpu_kernel_to_compile(tmp_path):
    # Optimised less, which takes three quarters of the time and changes nothing here.
    variables = {**os.environ, "FUSCO_CACHE_DIR": str(tmp_path), "NUMBA_OPT": "1"}
    # In a separate parent: this process may have compiled, and printed that for its children as well.
    command = ["sh", "-c", f"{sys.executable} -m fusco warm-up; exit $?"]
    first = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert f"CPU kernels: kept in {tmp_path}" in first.stdout
    assert first.stderr == "fusco: compiling CPU kernels, once on this machine\n"
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")}
    modules = {path.parent.name.rsplit("-", 1)[0] for path in kept}
    sources = (ROOT / "src" / "fusco").rglob("*.py")
    compiled = {path for path in sources if re.search(r"^@compiled\(", path.read_text(), re.MULTILINE)}
    # The simulator is for a machine without ranks, and compiles its own when it runs.
    others = {path for path in compiled if not {"simulate", "simulation"} & set(path.parts)}
    names = {".".join(path.relative_to(ROOT / "src").with_suffix("").parts) for path in others}
    assert modules == names
    again = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert again.stderr == ""
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")} == kept
