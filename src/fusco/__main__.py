"""``python -m fusco``, and the command ``fusco``."""

from __future__ import annotations

import sys


def run() -> None:
    """Import the command line and run it; Ctrl-C ends the import, which takes up to seconds, as it ends commands."""
    try:
        from fusco.cli.main import run as run_commands  # noqa: PLC0415  in the block
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    run_commands()


if __name__ == "__main__":
    run()
