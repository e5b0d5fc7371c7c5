"""``fusco integrations``: the folders of modules that replace other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_FOLDER = Path(__file__).parents[1] / "integrations" / "path"


def integrations(
    path: Annotated[str, typer.Option(metavar="MODULE", help="The module to print the folder of: deep_ep.")] = "",
) -> None:
    """List the modules that run other libraries' interfaces on fusco, or print the folder of one.

    A framework that imports deep_ep uses fusco if that folder comes first:

    export PYTHONPATH=$(fusco integrations --path deep_ep):$PYTHONPATH
    """
    modules = sorted(folder.name for folder in _FOLDER.iterdir() if (folder / "__init__.py").exists())
    if not path:
        typer.echo("\n".join(modules))
    elif path in modules:
        typer.echo(_FOLDER)
    else:
        raise ValueError(f"--path {path!r} is not one of {', '.join(modules)}")
