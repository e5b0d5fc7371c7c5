"""Hardware of a record: the GPU if rows were on it, else the processor."""

from dataclasses import dataclass

import pytest
import torch

from fusco.bench.environment import hardware, versions
from fusco.cli.origin import describe_origin


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


def test_the_processor_is_named_where_they_are_not():
    record = Record({"cpu": "a processor", "num_cores": 2}, {"torch": "2", "numba": "3"})
    assert describe_origin(record, 4, ("torch", "numba")) == "a processor, 2 cores; torch 2; numba 3; commit c0ffee"


def test_versions_of_more_packages_are_known_when_asked_for():
    assert set(versions("rich")) - set(versions()) == {"rich"}
