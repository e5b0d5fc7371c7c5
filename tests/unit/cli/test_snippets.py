"""Commands on pages can be parsed by the commands' own options; every other block runs, or is one of few fragments."""

from __future__ import annotations

import os
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from command_line import run

from fusco.cli.main import app
from snippets import PAGES, ROOT, python_of, snippets_of

MAX_FRAGMENTS = 9
SHOWN = {"text", "toml", "yaml"}  # output and files, which nothing runs
RUN_BY = {  # the pages with Python, and the tests that run it
    "README.md": "multirank/test_bench.py",
    **dict.fromkeys(
        ("docs/balance.md", "docs/coming_from.md", "docs/extending.md", "docs/faults.md", "docs/offload.md"),
        "multirank/test_page_snippets.py",
    ),
    "docs/fsdp.md": "multirank/test_page_snippets.py",
    "docs/rails.md": "unit/rails/test_rails_page.py",
    "docs/testbed.md": "testbed/test_testbed_page.py",
    **{f"docs/training/{page}.md": "multirank/test_training_pages.py" for page in ("lora", "runs", "trainer")},
}
# Programs of others, of which a page shows a command; a test would need the framework, GPUs or Docker.
OF_OTHERS = {"vllm", "docker", "npx", "sglang.launch_server"}
NAMED = {"train.py", "pretrain_gpt.py"}  # programs of the reader
RUNS = {"fusco plan", "fusco schedule", "fusco integrations", "fusco explore"}


def commands(name):
    """Yield the commands of a page as lists of words, each with the environment that precedes it left out."""
    for snippet in snippets_of(name):
        if snippet.language == "commands" and not snippet.is_fragment:
            for line in snippet.text.replace("\\\n", " ").splitlines():
                for part in re.split(r" && ", line):
                    words = split(part)
                    while words and re.fullmatch(r"[A-Z0-9_]+=.*", words[0]):
                        del words[0]
                    if words:
                        yield words


def split(line):
    """Return the words of a line, or all of it as one if it is none of a shell."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return [line]


ALL = [(name, words) for name in PAGES for words in commands(name)]


@pytest.mark.parametrize(("page", "words"), ALL, ids=[f"{page}: {' '.join(words)[:60]}" for page, words in ALL])
def test_commands_on_pages_can_be_run(page, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parse(words)


def parse(words):
    """Raise if a command of a page does not exist, or lacks an option that it is given."""
    match words:
        case ["fusco", *arguments]:
            parse_fusco(arguments)
        case ["export", *assignment]:
            assert re.match(r"[A-Z0-9_]+=", assignment[0])
            for inner in re.findall(r"\$\(fusco (.*?)\)", " ".join(assignment)):
                parse_fusco(inner.split())
        case ["make", *targets]:
            makefile = (ROOT / "Makefile").read_text()
            for target in targets:
                variable, is_set, _ = target.partition("=")
                assert re.search(rf"\$[({{]{variable}\b" if is_set else rf"^{target}:", makefile, re.MULTILINE), target
        case ["pip", "install", *packages]:
            project = (
                (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]\n")[1].split("\n[")[0]
            )
            extras = re.findall(r"^(\w+) = ", project, re.MULTILINE)
            asked = [
                name for package in packages for found in re.findall(r"\[(.*)\]", package) for name in found.split(",")
            ]
            assert set(asked) <= set(extras), asked
        case ["torchrun" | "python", *arguments]:
            parse_program(arguments)
        case ["pytest", *paths]:
            assert all((ROOT / path).exists() for path in paths if path.startswith("tests"))
        case [program, *_]:
            assert program in OF_OTHERS, words


def parse_program(arguments):
    """Raise unless a program that Python runs exists; ``-m fusco`` is parsed."""
    if "-m" in arguments:
        module, *rest = arguments[arguments.index("-m") + 1 :]
        assert module in {"fusco", *OF_OTHERS}
        if module == "fusco":
            parse_fusco(rest)
        return
    (program, *_) = [word for word in arguments if word.endswith(".py")]
    assert program in NAMED or (ROOT / program).exists(), program


def parse_fusco(arguments):
    """Raise unless the words after ``fusco`` are a command with its options; what it reads is made here."""
    for option, word in pairwise(arguments):
        if re.fullmatch(r"[\w./-]+\.(npz|toml|jsonl)", word):
            Path(word).touch()
        elif option in {"--resume", "--model"}:
            Path(word).mkdir(parents=True, exist_ok=True)
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        name, *arguments = arguments
        command = command.commands[name]
    assert command.make_context(command.name, list(arguments)).params is not None


@pytest.mark.parametrize(
    "line",
    [
        "fusco bench shuffle --no-such-option",
        "fusco bench nothing",
        "make nothing",
        "pip install 'fusco[nothing]'",
        "python examples/nothing.py",
        "nothing",
    ],
)
def test_wrong_commands_are_found(line):
    with pytest.raises(Exception, match=r"."):
        parse(shlex.split(line))


@pytest.mark.parametrize("words", [words for _, words in ALL if " ".join(words[:2]) in RUNS], ids=" ".join)
def test_short_commands_run(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if any(word.endswith((".npz", ".toml", ".jsonl")) and not Path(word).exists() for word in words):
        pytest.skip("it reads a file of the reader's")
    done = run(*words[1:])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page):
    assert {each.language for each in snippets_of(page)} <= {"commands", "python", *SHOWN}


def test_python_of_pages_is_run_by_tests():
    assert {page for page in PAGES if python_of(page)} == set(RUN_BY)
    assert [test for test in RUN_BY.values() if not (ROOT / "tests" / test).exists()] == []


def test_fragments_are_few():
    fragments = [f"{page}: {each.text[:40]}" for page in PAGES for each in snippets_of(page) if each.is_fragment]
    assert len(fragments) <= MAX_FRAGMENTS, os.linesep.join(fragments)
