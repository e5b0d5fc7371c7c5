"""``fusco``: the commands, and the only place that turns errors into messages and exit codes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

import fusco
from fusco.bench.ranks.failures import RankFailedError, ReportedElsewhereError, error_text
from fusco.cli.bench import app as bench_app
from fusco.cli.doctor import doctor
from fusco.cli.explore.command import explore
from fusco.cli.help import CommandGroup, add_commands
from fusco.cli.plan import plan
from fusco.cli.rails import rails
from fusco.cli.running import Interrupted, Terminated
from fusco.cli.schedule import schedule
from fusco.cli.simulate import simulate
from fusco.cli.testbed import run_testbed
from fusco.cli.train import train
from fusco.cli.warm_up import warm_up
from fusco.core.requirements import RequirementError, check_torch

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


_LOCAL_RANK = "LOCAL_RANK"  # torchrun's
_FIRST_RANK_REPORTS_S = 5.0  # with more ranks than cores, interpreters start seconds apart

_UsageError: type[Exception] = typer.BadParameter.mro()[1]  # of click, or of a copy that comes with typer

app = typer.Typer(
    name="fusco",
    cls=CommandGroup,
    help="Expert-parallel communication for PyTorch: measure it, explain it, check this machine for it.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="markdown",
)
app.add_typer(bench_app, name="bench")
add_commands(app, (plan, schedule, simulate, explore, train, rails, doctor, warm_up, integrations, run_testbed))


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"fusco {fusco.__version__}")
        raise typer.Exit


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise Interrupted


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # handled once: cleaning up has limits
    raise Terminated


@app.callback()
def _fusco(
    context: typer.Context,
    *,
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand != "doctor":  # doctor has a row for it
        check_torch()


def run() -> None:
    """Run the command line; exit code 2 for bad input, 1 for a failed check or run, 130 for Ctrl-C, 143 for SIGTERM."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # of a locale without the characters of charts
    try:
        with _interruptible():
            code = app(standalone_mode=False)  # errors are printed here
        sys.exit(code)
    except Interrupted as interrupt:
        name, code = ("terminated", 143) if isinstance(interrupt, Terminated) else ("interrupted", 130)
        Console(stderr=True).print(f"[bold red]{name}[/]{escape(str(interrupt))}", highlight=False, soft_wrap=True)
        sys.exit(code)
    except _UsageError as error:
        _wait_for_first_rank()
        _print_usage_error(error)
        sys.exit(2)
    except ReportedElsewhereError:
        sys.exit(1)
    except RankFailedError as error:
        _print_error("failed", error.summary)
        if error.unexpected:
            _print_error("traceback", error.unexpected)
        sys.exit(1)
    except (ValueError, OSError, OverflowError, RequirementError) as error:
        _wait_for_first_rank()
        _print_error("error", str(error))
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        without_text = "there is not enough memory" if isinstance(error, MemoryError) else type(error).__name__
        _print_error("failed", error_text(error) or without_text)
        sys.exit(1)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise ``Interrupted`` on Ctrl-C and ``Terminated`` on SIGTERM, unless other handlers are installed.

    On the ranks of a launcher SIGTERM keeps its default: it ends the process, and the launcher ends all others.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if before[signal.SIGINT] is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    if before[signal.SIGTERM] is signal.SIG_DFL and _LOCAL_RANK not in os.environ:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None is a handler that Python did not install
                signal.signal(number, handler)


def _wait_for_first_rank() -> None:
    """Give the first rank of this machine time to print the error of arguments that all ranks have.

    The launcher then ends the others, which would repeat it. A rank that is still alive has a different error.
    """
    if os.environ.get(_LOCAL_RANK, "0") != "0":
        time.sleep(_FIRST_RANK_REPORTS_S)


def _print_usage_error(error: Any) -> None:
    """Print what is wrong with which value of an option, or with the command; without a command, its help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return
    text = error.format_message()
    words = [word for arg in sys.argv for word in (arg.split("=", 1) if arg.startswith("--") else [arg])]
    options: Sequence[str] = getattr(getattr(error, "param", None), "opts", ())
    if given := [after for option, after in pairwise(words) if option in options]:
        text = f"{options[0]} {', '.join(given)}: {error.message.removeprefix('Value error, ')}"
    _print_error("error", text.rstrip(".") + (f" (see {error.ctx.command_path} --help)" if error.ctx else ""))


def _print_error(what: str, text: str) -> None:
    Console(stderr=True).print(f"[bold red]{what}:[/] {escape(text)}", highlight=False, soft_wrap=True)
