"""The logger of fusco: what was made, on which ranks and links."""

from __future__ import annotations

import logging
import os

LEVEL_VARIABLE = "FUSCO_LOG"
LOGGER = logging.getLogger("fusco")


def configure_logging() -> None:
    """Print messages from the level in ``FUSCO_LOG`` on to stderr; without it, the program's own handlers decide.

    Raises ``ValueError`` for a value that is no level of ``logging``.
    """
    name = os.environ.get(LEVEL_VARIABLE)
    if not name:
        return
    if name.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError(f"{LEVEL_VARIABLE} must be DEBUG, INFO, WARNING or ERROR, got {name!r}")
    LOGGER.setLevel(name.upper())
    if not LOGGER.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("fusco: %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.propagate = False  # the root's handlers would print it again
