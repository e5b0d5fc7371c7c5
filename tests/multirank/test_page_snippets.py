"""Snippets of pages run on two ranks, each after the one before; those of docs/training have tests of their own."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="tests of fusco.fsdp need transformers: pip install 'transformers>=5.9'")

import fsdp_page_jobs as jobs

from snippets import python_of

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]


@pytest.mark.parametrize("page", jobs.GIVEN)
def test_snippets_of_the_page_run(two, page):
    snippets = python_of(page)
    assert snippets
    two.run(jobs.run_snippets, page, snippets)
