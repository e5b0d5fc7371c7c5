"""``fusco doctor``: what it finds, and what it says of it."""

import ctypes
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from command_line import ROOT, run

from fusco.bench.ranks import progress
from fusco.cli import doctor
from fusco.core.requirements import LEAST_OF_FSDP, LEAST_VERSIONS


def test_doctor_knows_the_versions_that_are_needed(monkeypatch):
    needed = (ROOT / "pyproject.toml").read_text()
    assert all(f'"{name}>={least}"' in needed for name, least in LEAST_VERSIONS.items())
    assert all(f'"{name}>={least}"' in needed for name, least in LEAST_OF_FSDP.items())
    shown = " ".join((ROOT / "README.md").read_text().split())
    assert f"PyTorch {LEAST_VERSIONS['torch']}, or newer" in shown
    assert f"torch=={LEAST_VERSIONS['torch']}.0" in (ROOT / "Makefile").read_text()
    monkeypatch.setattr(
        doctor, "installed", {"torch": "2.6.0+cu124", "numba": "0.61.0rc1", "numpy": "2.0.0"}.__getitem__
    )
    packages = next(finding for finding in doctor.examine() if finding.check == "packages")
    assert (packages.state, packages.remedy) == ("missing", "pip install 'torch>=2.7'")


def test_doctor_writes_what_it_prints(tmp_path):
    done = run("doctor", "--json", str(tmp_path / "doctor.jsonl"))
    assert done.exit_code == 0
    assert "to do: " in done.output
    written = [json.loads(line) for line in (tmp_path / "doctor.jsonl").read_text().splitlines()]
    assert {"packages", "NCCL (between nodes on CUDA)"} <= {finding["check"] for finding in written}


def test_doctor_finds_the_cpu_backend_usable():
    done = run("doctor", "--json", "-")
    assert done.exit_code == 0
    findings = {finding["check"]: finding for finding in map(json.loads, done.stdout.splitlines())}
    assert "what to do" in done.stderr
    assert findings["shared memory"]["state"] == "ok"
    assert all(finding["remedy"] for finding in findings.values() if finding["state"] != "ok")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(101, "Network is unreachable"), "Network is unreachable"),
        (TimeoutError("timed out"), "nothing within 5 s"),
    ],
)
def test_a_machine_without_a_loopback_device(error, reason, monkeypatch):
    def unreachable(*_):
        raise error

    monkeypatch.setattr(progress, "create_connection", unreachable)
    message = f"processes do not reach each other at 127.0.0.1: {reason}"
    with pytest.raises(OSError, match=message):
        progress.new_store()
    finding = next(finding for finding in doctor.examine() if finding.check.startswith("gloo"))
    assert (finding.state, finding.found) == ("missing", f"in this torch, but {message}")


def test_doctor_has_a_row_for_each_check_that_fails(monkeypatch):
    def fail(*_):
        raise ImportError("libtorch.so is missing")

    monkeypatch.setattr("fusco.cpu.kernels.warm_up.warm_up_cpu", fail)
    monkeypatch.setattr("torch.cuda.is_available", fail)
    findings = {finding.check: finding for finding in doctor.examine()}
    assert len(findings) == 16
    failed = {name: finding.state for name, finding in findings.items() if "libtorch.so is missing" in finding.found}
    of_gpus = ("GPUs", "GPUs that reach each other", "CUDA kernels")
    assert failed == {"CPU kernels": "missing", **dict.fromkeys(of_gpus, "optional")}


def test_doctor_names_the_variable_that_disables_numba(monkeypatch):
    monkeypatch.setattr("numba.core.config.DISABLE_JIT", 1)
    finding = doctor._examine("CPU kernels", doctor._kernels, "missing", "missing")
    assert (finding.state, finding.remedy) == ("missing", "unset NUMBA_DISABLE_JIT")


def test_doctor_outlives_a_torch_that_cannot_be_imported(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}
    command = [sys.executable, "-m", "fusco", "doctor", "--json", "-"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    findings = {finding["check"]: finding for finding in map(json.loads, done.stdout.splitlines())}
    assert findings["CPU kernels"]["state"] == "missing"
    assert "libcudart.so.12" in findings["CPU kernels"]["found"]
    assert findings["system"]["state"] == "ok"


def test_doctor_says_where_kernels_are_kept(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSCO_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (finding,) = [finding for finding in doctor.examine() if finding.check == "cache of compiled kernels"]
    assert finding.state == "optional"
    assert f"kept in {tmp_path}/fusco-" in finding.found
    assert all(name in finding.remedy for name in ("FUSCO_CACHE_DIR", "NUMBA_CACHE_DIR", "fusco warm-up"))


@pytest.fixture
def found_of(monkeypatch):
    """Findings of checks by name, on a machine with GPUs of these compute capabilities and a driver of this number."""

    def examine(name: str, capabilities: list[tuple[int, int]], driver: int | None = None, nvrtc: int | None = 13):
        def get_version(number):
            number._obj.value = driver
            return 0

        def load(name):
            if driver is None:
                raise OSError(f"{name}: cannot open shared object file")
            return SimpleNamespace(cuDriverGetVersion=get_version)

        bindings = None if nvrtc is None else SimpleNamespace(nvrtc=SimpleNamespace(nvrtcVersion=lambda: (0, nvrtc, 5)))
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: len(capabilities))
        monkeypatch.setattr("torch.cuda.get_device_capability", capabilities.__getitem__)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda i: f"GPU {i}")
        monkeypatch.setattr(ctypes, "CDLL", load)
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        (check,) = (check for check in doctor._CHECKS if check[0] == name)
        return doctor._examine(*check)

    return examine


def test_doctor_says_which_gpus_are_too_old(found_of):
    assert found_of("GPUs", [(8, 0), (9, 0)]).state == "ok"
    old = found_of("GPUs", [(7, 5)])
    assert (old.state, old.remedy) == ("optional", "GPUs of compute capability 8.0 (A100) or newer")
    one_of_three = found_of("GPUs", [(9, 0), (7, 0), (8, 6)])
    assert one_of_three.found == "GPU 0 (9.0), GPU 1 (7.0), GPU 2 (8.6); in brackets compute capability"
    assert one_of_three.remedy.endswith("; CUDA_VISIBLE_DEVICES=0,2 leaves out others")


@pytest.mark.parametrize(
    ("driver", "nvrtc", "found", "remedy"),
    [
        (13000, 13, "for CUDA 13.0", ""),
        (13000, 12, "for CUDA 13.0", ""),
        (12090, 13, "for CUDA 12.9", "an NVIDIA driver for CUDA 13, 580 or newer: it loads what NVRTC 13 compiles"),
        (11080, 12, "for CUDA 11.8", "an NVIDIA driver for CUDA 12, 525 or newer: it loads what NVRTC 12 compiles"),
        (12090, None, "for CUDA 12.9", "an NVIDIA driver for CUDA 13, 580 or newer: it loads what NVRTC 13 compiles"),
        (13000, 14, "for CUDA 13.0", "an NVIDIA driver for CUDA 14: it loads what NVRTC 14 compiles"),
    ],
)
def test_doctor_says_which_driver_kernels_need(found_of, driver, nvrtc, found, remedy):
    finding = found_of("CUDA driver", [(9, 0)], driver, nvrtc)
    assert (finding.state, finding.found, finding.remedy) == ("optional" if remedy else "ok", found, remedy)


def test_doctor_says_that_there_is_no_driver(found_of):
    finding = found_of("CUDA driver", [])
    assert (finding.state, finding.found) == ("optional", "none: libcuda.so.1: cannot open shared object file")
    assert "580 or newer" in finding.remedy


def test_doctor_compiles_for_the_gpus_that_are_there(found_of, monkeypatch):
    compiled = []
    monkeypatch.setattr("fusco.cuda.kernels.compiler.Compiler._compile", lambda it, *_: compiled.append(it.arch) or b"")
    assert found_of("CUDA kernels", [(12, 0), (8, 0), (7, 0), (8, 0)]).state == "ok"
    assert compiled == ["sm_80", "sm_120"]


def test_doctor_says_how_to_get_a_missing_nvrtc(found_of):
    examined = found_of("CUDA driver", [(9, 0)], 13000)  # with bindings, of which the next two lack the library
    assert examined.state == "ok"

    def fail():
        raise RuntimeError("no libnvrtc.so.13")

    sys.modules["cuda.bindings"].nvrtc.nvrtcVersion = fail
    (driver, kernels) = (
        doctor._examine(*check) for check in doctor._CHECKS if check[0] in ("CUDA driver", "CUDA kernels")
    )
    assert (driver.state, driver.found) == ("ok", "for CUDA 13.0")
    assert kernels.found == "NVRTC, which compiles CUDA kernels, cannot be loaded: no libnvrtc.so.13"
    assert "pip install 'cuda-core[cu13]'" in kernels.remedy
