"""Environment of a record: the GPU if rows were on it, else the processor; the commit of fusco's own repository."""

import shutil
import subprocess
from dataclasses import dataclass

import pytest
import torch

from fusco.bench.harness.environment import describe_commit, hardware, versions
from fusco.cli.tables import describe_origin
from fusco.core.environment import SHARE_GPUS


@dataclass(frozen=True)
class Record:
    hardware: dict
    versions: dict
    commit: str = "c0ffee"


@pytest.fixture
def _gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU number {index}")


@pytest.mark.usefixtures("_gpu")
def test_the_gpu_is_named_where_rows_are_on_it():
    assert hardware("cuda") == {**hardware(), "gpu": "GPU number 0"}
    record = Record(hardware("cuda"), {"torch": "2", "numba": "3"})
    assert describe_origin(record, 4) == "4 x GPU number 0; torch 2; commit c0ffee"


@pytest.mark.usefixtures("_gpu")
def test_ranks_that_share_a_gpu_are_not_listed_as_gpus(monkeypatch):
    monkeypatch.setenv(SHARE_GPUS, "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    record = Record(hardware("cuda"), {"torch": "2", "numba": "3"})
    assert describe_origin(record, 2).startswith("2 ranks that share 1 x GPU number 0; ")
    assert describe_origin(record, 1).startswith("1 x GPU number 0; ")


def test_the_processor_is_named_where_they_are_not():
    record = Record({"cpu": "a processor", "num_cores": 2}, {"torch": "2", "numba": "3"})
    assert describe_origin(record, 4, ("torch", "numba")) == "a processor, 2 cores; torch 2; numba 3; commit c0ffee"


def test_an_installed_package_is_named_by_its_version():
    record = Record({"cpu": "a processor", "num_cores": 2}, {"torch": "2", "fusco": "1.5"}, commit="none")
    assert describe_origin(record, 4) == "a processor, 2 cores; torch 2; fusco 1.5"


def test_versions_of_more_packages_are_known_when_asked_for():
    assert set(versions("rich")) - set(versions()) == {"rich"}


@pytest.fixture
def checkout(tmp_path):
    """A repository with one commit, in which src/fusco is tracked."""
    if not shutil.which("git"):
        pytest.skip("needs git")
    return repository(tmp_path / "checkout", "fusco", "src/fusco")


def repository(root, project, package):
    (root / package).mkdir(parents=True)
    (root / package / "__init__.py").touch()
    (root / "pyproject.toml").write_text(f'[project]\nname = "{project}"\n')
    git(root, "init")
    git(root, "add", ".")
    git(root, "-c", "user.name=n", "-c", "user.email=e", "commit", "-m", "first")
    return root


def git(root, *arguments):
    subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True)


def test_the_commit_is_that_of_the_checkout(checkout):
    described = describe_commit(checkout / "src" / "fusco")
    assert len(described) == 12
    (checkout / "src" / "fusco" / "__init__.py").write_text("changed")
    assert describe_commit(checkout / "src" / "fusco") == f"{described}-dirty"


def test_a_repository_that_encloses_an_installation_is_not_named(checkout, tmp_path, monkeypatch):
    installed = checkout / ".venv" / "lib" / "site-packages" / "fusco"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    assert describe_commit(installed) == "none"
    git(checkout, "add", "--force", ".venv")  # even if it is tracked
    assert describe_commit(installed) == "none"
    assert describe_commit(repository(tmp_path / "other", "other", "src/fusco") / "src" / "fusco") == "none"
    alone = tmp_path / "alone" / "src" / "fusco"
    alone.mkdir(parents=True)
    assert describe_commit(alone) == "none"
    monkeypatch.setenv("GIT_DIR", str(checkout / ".git"))
    assert describe_commit(alone) == "none"


def test_a_sources_copy_that_no_repository_tracks_has_no_commit(checkout):
    copy = checkout / "vendored"
    (copy / "src" / "fusco").mkdir(parents=True)
    (copy / "src" / "fusco" / "__init__.py").touch()
    (copy / "pyproject.toml").write_text('name = "fusco"')
    assert describe_commit(copy / "src" / "fusco") == "none"
