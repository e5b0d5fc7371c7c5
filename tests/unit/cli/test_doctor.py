"""``fusco doctor``: what it finds, and what it says of it."""

import json
import os
import subprocess
import sys

from command_line import ROOT, run

from fusco.cli import doctor
from fusco.core.requirements import (
    LEAST_OF_FSDP,
    LEAST_VERSIONS,
)


def test_doctor_knows_the_versions_that_are_needed(monkeypatch):
    needed = (ROOT / "pyproject.toml").read_text()
    assert all(f'"{name}>={least}"' in needed for name, least in LEAST_VERSIONS.items())
    assert all(f'"{name}>={least}"' in needed for name, least in LEAST_OF_FSDP.items())
    shown = " ".join((ROOT / "README.md").read_text().split())
    assert f"PyTorch {LEAST_VERSIONS['torch']} or newer" in shown
    assert f"torch=={LEAST_VERSIONS['torch']}.0" in (ROOT / "Makefile").read_text()
    monkeypatch.setattr(
        doctor, "installed", {"torch": "2.6.0+cu124", "numba": "0.61.0rc1", "numpy": "2.0.0"}.__getitem__
    )
    packages = next(finding for finding in doctor.examine() if finding.check == "packages")
    assert (packages.state, packages.remedy) == ("missing", "pip install 'torch>=2.7'")


def test_doctor_writes_what_it_prints(tmp_path):
    done = run("doctor", "--json", str(tmp_path / "doctor.jsonl"))
    assert done.exit_code == 0
    assert "what to do" in done.output
    written = [json.loads(line) for line in (tmp_path / "doctor.jsonl").read_text().splitlines()]
    assert {"packages", "NCCL (between nodes on CUDA)"} <= {finding["check"] for finding in written}


def test_doctor_finds_the_cpu_backend_usable():
    done = run("doctor", "--json", "-")
    assert done.exit_code == 0
    findings = {finding["check"]: finding for finding in map(json.loads, done.stdout.splitlines())}
    assert "what to do" in done.stderr
    assert findings["shared memory"]["state"] == "ok"
    assert all(finding["remedy"] for finding in findings.values() if finding["state"] != "ok")


def test_doctor_has_a_row_for_each_check_that_fails(monkeypatch):
    def fail(*_):
        raise ImportError("libtorch.so is missing")

    monkeypatch.setattr("fusco.cpu.kernels.warm_up.warm_up_cpu", fail)
    monkeypatch.setattr("torch.cuda.is_available", fail)
    findings = {finding.check: finding for finding in doctor.examine()}
    assert len(findings) == 15
    failed = {name: finding.state for name, finding in findings.items() if "libtorch.so is missing" in finding.found}
    assert failed == {"CPU kernels": "missing", "GPUs": "optional", "GPUs that reach each other": "optional"}


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
