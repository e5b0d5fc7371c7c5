"""``python -m fusco.testbed.enter NAMESPACES COMMAND...``: execute a command in a testbed's namespaces."""

from __future__ import annotations

import json
import os
import sys

from fusco.testbed.namespaces import Namespaces

_NOT_STARTED = 127  # exit code, as of a shell


def main() -> None:
    """Enter the namespaces given as JSON, then execute the command instead of this program."""
    namespaces, command = Namespaces(**json.loads(sys.argv[1])), sys.argv[2:]
    try:
        namespaces.enter()
    except OSError as error:
        _fail(f"cannot enter the testbed, which may be closed: {error}")
    try:
        os.execvp(command[0], command)  # noqa: S606  the command is the caller's
    except (OSError, ValueError) as error:  # Python refuses an empty name itself
        _fail(f"cannot execute {command[0]!r}: {getattr(error, 'strerror', error)}")


def _fail(why: str) -> None:
    sys.stderr.write(f"fusco testbed: {why}\n")
    sys.exit(_NOT_STARTED)


if __name__ == "__main__":
    main()
