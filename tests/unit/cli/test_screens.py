"""The default output of each command fits a screen and ends with its finding."""

from __future__ import annotations

import re

import pytest
from test_help import COMMANDS
from test_reference_pages import SECTIONS, require_fields
from test_tables import print_decode, print_offload, print_prefill, print_rails, print_train, shown
from typer.testing import CliRunner

from fusco.cli.main import app

SCREEN, WIDTH = 40, 100  # lines, columns
VARIANTS = r"fusco [\d.,]+ ms, [\w-]+ [\d.,]+ ms: (takes )?[\d.]+ times as (fast|long), "
LINES = {  # commands at small sizes, and their findings
    "plan --tokens 64": r"the busiest rank sends or receives 1\.\d\d times the bound with balancer 'lanes', .* plain",
    "schedule": r"mode 'few': \d+ stages, [\d.]+ times the lower bound, [\d,]+ us by the model; 'exact' [\d,]+ us",
    "simulate --nodes 2 --tokens 64": r"2 x 8 ranks, 1,024 tokens: " + VARIANTS + "predicted",
    "explore --nodes 2 --tokens 64 --out {folder}/plan.html": r"wrote .*plan.html, [\d.]+ MB; open it in a browser",
    "doctor": r"fusco runs here on CPUs.*",
    "rails --once": r"rails of this host: no worker is registered",
    "warm-up": r"CUDA kernels: none, since .*|CUDA kernels for sm_.*",
    "integrations": "deep_ep",
    "bench balancers --draws 2": r"busiest rank over the bound, at most: lanes 1\.\d+, .*",
    "bench balance --layer 0": r"64 ranks: the busiest has [\d.]+ times the mean rows, with copies [\d.]+, .*",
    "bench schedule --draws 1": r"stages of 128 nodes are found in: exact [\d,]+ us, few [\d,]+ us, .*",
    "bench host --tokens 8 --calls 20": r"a dispatch and a combine take the host: exact [\d.]+ us on 1 rank, .*",
    "bench alltoall --bytes-per-rank 20000 --iterations 1": "trace: " + VARIANTS + "verified",
    "bench shuffle --tokens 16 --hidden 64 --iterations 1": "trace traffic: " + VARIANTS + "verified",
}
RECORDS = {  # commands of models, links and GPUs, shown from records of their default number of cases
    "train": (print_train, r"loss [\d,.]+ to [\d,.]+ nats, [\d,]+ tokens/s with fusco; a step of torch takes .*"),
    "bench prefill": (print_prefill, r"random, 1 prompt: " + VARIANTS + "verified; the least of 8 cases"),
    "bench decode": (print_decode, r"fusco [\d.e+]+ ms per token at 1 tokens a rank, best other .*, verified"),
    "bench rails": (print_rails, r"bandwidth, 4 senders to one receiver: receives Gbit/s, .*: fuselink [\d.e+]+, .*"),
    "bench offload": (print_offload, r"sizes, 1.5 GiB from GPU 0, .*: GB/s: cudaMemcpyAsync [\d.]+, .*"),
}


def require_screen(text, finding):
    *above, last = text.rstrip().splitlines()
    assert re.fullmatch(finding, last), last
    assert sum(max(1, -(-len(each) // WIDTH)) for each in (*above, last)) <= SCREEN, text


@pytest.mark.parametrize("line", LINES)
def test_a_screen_ends_with_the_finding_and_lines_of_json_have_the_fields_of_the_page(line, tmp_path):
    out = tmp_path / "out.jsonl"
    is_written = any(SECTIONS.get(name) for name in COMMANDS if line.startswith(name))
    arguments = [*line.format(folder=tmp_path).split(), *(("--json", str(out)) if is_written else ())]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": str(WIDTH)})
    assert done.exit_code == 0, done.output
    require_screen(done.output, LINES[line])
    if is_written:
        require_fields(line, out)


@pytest.mark.parametrize("command", RECORDS)
def test_a_screen_of_records_ends_with_the_finding(command):
    show, finding = RECORDS[command]
    options = {} if command == "train" else {"explain": False}
    require_screen(shown(lambda console: show(console, **options), WIDTH), finding)


def test_every_command_is_tested():
    tested = {name for name in COMMANDS if any(f"{line} ".startswith(f"{name} ") for line in (*LINES, *RECORDS))}
    assert set(COMMANDS) - tested == {"testbed"}  # runs another command
