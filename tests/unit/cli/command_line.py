"""The command line as tests run it."""

from pathlib import Path

from typer.testing import CliRunner

from fusco.cli.main import app

ROOT = Path(__file__).parents[3]


def run(*arguments):
    return CliRunner().invoke(app, arguments)
