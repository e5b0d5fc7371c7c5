"""``fusco``: the commands, and the one place that turns errors into sentences and exit codes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

import fusco
from fusco.cli.bench import app as bench_app
from fusco.cli.doctor import doctor
from fusco.cli.plan import plan
from fusco.cli.running import Interrupted
from fusco.cli.schedule import schedule
from fusco.cli.train import train
from fusco.ranks.failures import RankFailedError, in_words

app = typer.Typer(
    name="fusco",
    help="Expert-parallel communication for PyTorch: measure it, explain it, check this machine for it.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.add_typer(bench_app, name="bench")
app.command()(plan)
app.command()(schedule)
app.command()(train)
app.command()(doctor)


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"fusco {fusco.__version__}")
        raise typer.Exit


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise Interrupted


@app.callback()
def _fusco(
    *,
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_tell_version, help="Show the version and exit.")
    ] = False,
) -> None: ...


def run() -> None:
    """Run the command line; exit code 2 for bad input, 1 for a failed check or run, 130 for Ctrl-C."""
    try:
        with _interruptible():
            app()
    except Interrupted as interrupt:
        Console(stderr=True).print(f"[bold red]interrupted[/]{escape(str(interrupt))}", highlight=False, soft_wrap=True)
        sys.exit(130)
    except RankFailedError as error:
        _tell("failed", error.summary)
        if error.unexpected:
            _tell("traceback", error.unexpected)
        sys.exit(1)
    except (ValueError, OSError, OverflowError) as error:
        _tell("error", str(error))
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        _tell("failed", in_words(error) or "there is not enough memory")
        sys.exit(1)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises ``Interrupted``, unless somebody has chosen otherwise."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _tell(what: str, text: str) -> None:
    Console(stderr=True).print(f"[bold red]{what}:[/] {escape(text)}", highlight=False, soft_wrap=True)
