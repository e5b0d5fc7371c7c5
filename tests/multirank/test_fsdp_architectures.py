"""Gradients of four architectures; ``make test-architectures`` has all, and the page says what it found."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers", reason="tests of fusco.fsdp need transformers: pip install 'transformers>=5.9'")

import fsdp_architecture_jobs as jobs
import transformers
from check_architectures import PAGE, RECORDS, is_right, read_records, render
from fsdp_architectures import EXCEPTIONS, find_kinds

WAYS = ((2, "fusco"), (4, "torch"))

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]


@pytest.mark.parametrize("kind", ["llama4", "longcat_flash", "nemotron_h", "qwen3_vl_moe"])
def test_gradients_are_those_of_one_process(four, kind):
    found, *_ = four.run(jobs.compare, kind, WAYS)
    assert len(found.differences) == len(WAYS)
    assert jobs.is_within_limit(found.differences, found.noise), found


def test_the_page_says_what_was_found():
    assert render(read_records()) in PAGE.read_text()
    assert all(map(is_right, read_records()))
    assert {record["kind"] for record in read_records() if record["refused"]} == set(EXCEPTIONS)
    assert len(EXCEPTIONS) <= 3


def test_the_page_has_every_architecture():
    packages = json.loads(RECORDS.read_text().splitlines()[0])["hardware"]
    if not packages.endswith(f"transformers {transformers.__version__}"):
        pytest.skip(f"the page is of another version than transformers {transformers.__version__}: {packages}")
    assert sorted(record["kind"] for record in read_records()) == find_kinds()
