"""Help of every command: an example that is a right call, options in groups, flags without a type, no huge limits."""

from __future__ import annotations

import re
import shlex

import pytest
import typer
from typer.testing import CliRunner

from fusco.cli.help import EXAMPLES, GROUPS
from fusco.cli.main import app


def commands():
    """Yield the name and the command of each command."""
    root = typer.main.get_command(app)
    for name, command in root.commands.items():
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", each) for inner, each in command.commands.items())
        else:
            yield name, command


COMMANDS = dict(commands())


def test_every_command_has_an_example_and_every_example_a_command():
    assert set(COMMANDS) == set(EXAMPLES)
    for name, example in EXAMPLES.items():
        assert example == f"fusco {name}" or example.startswith(f"fusco {name} ")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_can_be_parsed(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    arguments = shlex.split(EXAMPLES[name].removeprefix(f"fusco {name}"))
    context = COMMANDS[name].make_context(name, arguments)
    assert context.params


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("width", [80, 140])
def test_help_shows_no_types_of_flags_and_no_limits_of_a_machine(name, width):
    shown = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": str(width)})
    assert shown.exit_code == 0
    assert "<bool>" not in shown.output
    assert EXAMPLES[name].split()[-1] in shown.output
    assert [limit for limit in re.findall(r"<=(\d+)\]", shown.output) if int(limit) >= 1024] == []
    assert max(map(len, shown.output.splitlines())) <= width


def test_groups_name_options_that_exist_once():
    have = {parameter.name for command in COMMANDS.values() for parameter in command.params}
    named = [name for names in GROUPS.values() for name in names.split()]
    assert sorted(set(named)) == sorted(named)
    assert set(named) <= have


def test_a_limit_that_is_not_shown_is_kept():
    done = CliRunner().invoke(app, ["bench", "shuffle", "--tokens", "99999999"])
    assert done.exit_code == 2
    assert "99999999 is more than 4,194,304" in re.sub(r"[\s│]+", " ", done.output)
