"""``python -m fusco``."""

from fusco.cli.main import run

run()
