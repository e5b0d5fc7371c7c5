"""``FUSCO_LOG`` prints what fusco logs."""

from __future__ import annotations

import logging

import pytest

from fusco.core.announcements import LOGGER, configure_logging


@pytest.fixture(autouse=True)
def _restored():
    before = LOGGER.level, LOGGER.propagate, list(LOGGER.handlers)
    yield
    LOGGER.level, LOGGER.propagate, LOGGER.handlers = before


def test_a_level_prints_to_stderr_once(monkeypatch, capfd):
    monkeypatch.setenv("FUSCO_LOG", "info")
    configure_logging()
    configure_logging()
    LOGGER.info("a %s", "line")
    LOGGER.debug("not this")
    assert capfd.readouterr().err == "fusco: a line\n"


def test_without_it_the_program_decides(monkeypatch):
    monkeypatch.delenv("FUSCO_LOG", raising=False)
    configure_logging()
    assert LOGGER.handlers == []
    assert LOGGER.level == logging.NOTSET


def test_an_unknown_level_is_refused(monkeypatch):
    monkeypatch.setenv("FUSCO_LOG", "loud")
    with pytest.raises(ValueError, match="FUSCO_LOG must be DEBUG, INFO, WARNING or ERROR, got 'loud'"):
        configure_logging()
