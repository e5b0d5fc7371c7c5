"""``fusco warm-up``: what it compiles, and that nothing is left to compile."""

import json
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


# Warms up in a process that has loaded nothing; prints the modules of all functions that are asked for, with those that
# they call, and the functions that were compiled.
ASK = """
import json
from numba.core.dispatcher import Dispatcher
from fusco.cli.main import app
from fusco.core.compiled import _KernelCache

load, waiting, compiled = _KernelCache.load_overload, [], []

def noted(cache, signature, context):
    found = load(cache, signature, context)
    waiting.append(cache._function)
    compiled.extend([cache._function.__qualname__] * (found is None))
    return found

_KernelCache.load_overload = noted
app(["warm-up"], standalone_mode=False)
asked = set()
while waiting:
    function = waiting.pop()
    if function not in asked:
        asked.add(function)
        named = [function.__globals__.get(name) for name in function.__code__.co_names]
        waiting += [each.py_func for each in named if isinstance(each, Dispatcher)]
print(json.dumps([sorted({function.__module__ for function in asked}), compiled]))
"""


def asked_and_compiled():
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    asked, compiled = json.loads(done.stdout.splitlines()[-1])
    return set(asked), compiled


def test_warm_up_leaves_no_cpu_kernel_to_compile():
    sources = (ROOT / "src" / "fusco").rglob("*.py")
    paths = {path for path in sources if re.search(r"^@compiled\(", path.read_text(), re.MULTILINE)}
    # The simulator is for a machine without ranks, and compiles its own when it runs.
    others = {path for path in paths if not {"simulate", "simulation"} & set(path.parts)}
    names = {".".join(path.relative_to(ROOT / "src").with_suffix("").parts) for path in others}
    asked, compiled = asked_and_compiled()
    if compiled:  # by now they are not
        asked, compiled = asked_and_compiled()
    assert (asked, compiled) == (names, [])
