"""Tests in the namespaces of a testbed; skipped, with the reason, where the system forbids them."""

from __future__ import annotations

import functools

import pytest

from fusco.testbed import Testbed, TestbedError


@functools.cache
def reason_against() -> str:
    try:
        Testbed(1, 1, "1gbit").close()
    except TestbedError as error:
        return str(error)
    return ""


@pytest.fixture(autouse=True)
def _needs_namespaces() -> None:
    if reason := reason_against():
        pytest.skip(reason)
