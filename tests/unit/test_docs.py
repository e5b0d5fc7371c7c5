"""What pages show of fusco's output is what it gives."""

import doctest
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_sizes():
    outcome = doctest.testfile(str(DOCS / "coming_from.md"), module_relative=False)
    assert (outcome.failed, outcome.attempted) == (0, 4)
