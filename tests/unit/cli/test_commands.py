"""The command line without ranks: errors as sentences, outputs, doctor, rails and benches that need none."""

import importlib.util
import io
import json
import re
import subprocess
import sys
from contextlib import closing

import pytest
from command_line import run

import fusco
from forked_interpreter import ForkedInterpreter
from fusco.cli import main
from fusco.core.requirements import LEAST_OF_FSDP, RequirementError, check_fsdp, check_torch, installed, is_recent
from fusco.rails.board import Board


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--matrix", ","], "--matrix needs at least one name"),
        (["--matrix", "uniform,diagonal"], "matrix 'diagonal' is not one of uniform, random, zipf, trace"),
        (["--matrix", "uniform,zipf", "--layer", "1"], "--layer goes with --matrix trace, not with uniform, zipf"),
        (["--num-experts", "64"], "the trace qwen3_30b_a3b_sharegpt1024, layer 0 names expert"),
    ],
)
def test_bench_alltoall_says_what_does_not_fit(arguments, message):
    done = run("bench", "alltoall", *arguments)
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)


def test_matrices_of_an_alltoall_come_with_commas_and_need_no_trace(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "fusco.cli.bench_alltoall.run_on_ranks", lambda _, arguments, *__, **___: asked.extend(arguments[0])
    )
    done = run("bench", "alltoall", "--matrix", "zipf,uniform", "--num-experts", "4")
    assert done.exit_code == 0, done.output
    assert [each.matrix for each in asked] == ["zipf", "uniform"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["shuffle", "--tokens", "4096", "--hidden", "100000000"],
            r"all ranks' rows .* need 19,660,800,000,000 bytes on 4 ranks of this machine, but [\d,]+ are free",
        ),
        (
            ["alltoall", "--bytes-per-rank", str(10**12)],
            r"buffers .* need 1\d,\d{3},\d{3},\d{3},\d{3} bytes on 4 ranks",
        ),
    ],
)
def test_what_does_not_fit_into_memory_is_refused_before_ranks_start(arguments, message, monkeypatch):
    monkeypatch.setattr("fusco.bench.ranks.local_world.LocalWorld", None)
    done = run("bench", *arguments, "--iterations", "1")
    assert isinstance(done.exception, ValueError)
    assert re.search(message, str(done.exception))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["bench", "shuffle", "--num-topk", "4"],
            "error: the trace has top-8, num_topk is 4: choose --num-topk 8, or generated --traffic\n",
        ),
        (["plan", "--nodes", "0"], "error: --nodes 0: "),
        (["plan", "--hidden=x"], "error: --hidden x: "),
        (["plan", "--skew", "0.5"], "error: --skew 0.5 goes with --shuffle, such as --shuffle zipf"),
        (
            ["plan", "--shuffle", "random", "--skew", "0.5"],
            "error: --skew 0.5 goes with --shuffle zipf, not with rando",
        ),
        (
            ["plan", "--shuffle", "zipf", "--num-topk", "4", "--traffic", "trace"],
            "error: --shuffle plans segments, wit",
        ),
        (  # also if it is given as it is by default
            ["plan", "--shuffle", "zipf", "--tokens", "1024"],
            "error: --shuffle plans segments, without tokens and experts: leave out --tokens",
        ),
        (
            ["schedule", "--matrix", "uniform", "--skew", "0.5"],
            "error: --skew 0.5 goes with --matrix zipf, not with uniform",
        ),
        (["bench", "alltoall", "--matrix", "random,uniform", "--skew", "0.5"], "error: --skew 0.5 goes with --matrix"),
        (["bench", "alltoall", "--bytes-per-rank", "9" * 30], f"error: --bytes-per-rank {'9' * 30}: "),
        (["bench", "host", "--ranks", "1", "--ranks", "0"], "error: --ranks 1, 0: "),
        (["plan", "--json", "/nowhere/a"], "error: --json /nowhere/a: there is no directory /nowhere"),
        (["bench", "alltoall", "--device", "tpu"], "error: --device tpu: 'tpu' is not one of 'cpu', 'cuda'"),
        (["nothing"], "error: No such command 'nothing'"),
        (["train", "--layers", "10000000"], "error: parameters and the optimizer's states (--layers, --hidden) need"),
        (
            ["warm-up", "--arch", "sm_75"],
            "error: --arch 'sm_75' is none that fusco's kernels and this NVRTC have: sm_80",
        ),
    ],
)
def test_bad_input_is_a_sentence_and_exit_code_2(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fusco", *arguments])
    with pytest.raises(SystemExit) as exited:
        main.run()
    assert exited.value.code == 2
    written = capsys.readouterr()
    assert written.err.startswith(message)
    assert written.err.count("\n") == 1
    assert not written.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda", "--nodes", "2", "--ranks-per-node", "4"], "8 ranks need a GPU each, but torch finds 4"),
        (["--device", "cuda", "--nodes", "3"], "4 GPUs do not divide among 3 nodes"),
        (["--device", "cuda", "--ablation"], "there is 1 node: pass --nodes"),
        (["--device", "cuda", "--nodes", "2", "--variants", "fusco-fp8"], "'fusco-fp8' is not one of those on cuda"),
        (["--variants", "fusco,none:x"], "variant 'none:x' cannot be imported: No module named 'none'; is its folder"),
        (["--variants", "math:pi"], "variant 'math:pi' is a float, not a function or a class"),
        (["--variants", "fusco,best"], "variant 'best' is not one of fusco, fusco-static, fusco-graph"),
        (["--traffic", "uniform,rush-hour"], "traffic 'rush-hour' is not one of trace, uniform, single-node"),
        (["--traffic", ","], "--traffic needs at least one name"),
        (["--traffic", "uniform", "--trace", __file__], "--trace goes with --traffic trace, not with uniform"),
        (["--traffic", "uniform,zipf", "--layer", "1"], "--layer goes with --traffic trace, not with uniform, zipf"),
        (["--traffic", "uniform", "--trace-key", "ids"], "--trace-key goes with --traffic trace, not with uniform"),
        (["--batches", "2"], "--batches 2 goes with --traffic one-prompt or ragged, on the CPU"),
        (["--num-sms", "4"], "--num-sms needs --device cuda"),
        (["--variants", ","], "--variants needs at least one name"),
        (
            ["--timeline", "out.json", "--variants", "baseline"],
            "shows fusco or fusco-static, but the variants are baseline",
        ),
        (
            ["--device", "cuda", "--timeline", "out.json", "--variants", "baseline"],
            "shows fusco or fusco-static, but the variants are baseline",
        ),
    ],
)
def test_bench_shuffle_says_what_does_not_fit(arguments, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    done = run("bench", "shuffle", *arguments)
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)


@pytest.mark.parametrize(
    "arguments",
    [["bench", "shuffle"], ["bench", "shuffle", "--variants", "fusco-static"], ["bench", "alltoall"], ["train"]],
)
def test_on_gpus_it_says_how_to_get_what_compiles_kernels(arguments, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name.startswith("cuda") else find_spec(name))
    monkeypatch.setattr(
        "fusco.bench.ranks.local_world.LocalWorld.__init__", lambda *_, **__: pytest.fail("it starts ranks")
    )
    if arguments == ["train"] and not all(is_recent(installed(name), least) for name, least in LEAST_OF_FSDP.items()):
        pytest.skip("fusco train needs newer packages")
    done = run(*arguments, "--device", "cuda")
    assert str(done.exception) == "device 'cuda' needs the package cuda-core: pip install 'cuda-core[cu13]'"


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--json"],
        ["schedule", "--json"],
        ["bench", "shuffle", "--json"],
        ["bench", "shuffle", "--device", "cuda", "--timeline"],
        ["bench", "alltoall", "--json"],
        ["bench", "schedule", "--json"],
        ["bench", "balancers", "--json"],
        ["train", "--record-trace"],
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(arguments, tmp_path):
    done = run(*arguments, str(tmp_path / "nowhere" / "out.json"))
    assert done.exit_code == 2
    assert f"Invalid value for '{arguments[-1]}'" in done.output
    assert "there is no directory" in done.output


def test_what_cannot_be_written_after_all_has_been_shown(monkeypatch, tmp_path):
    def is_full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr("fusco.cli.plan.write_json_lines", is_full)
    done = run("plan", "--tokens", "64", "--json", str(tmp_path / "plan.jsonl"))
    assert "no space left" in str(done.exception)
    assert "duplicates avoided" in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--tokens", "64"],
        ["schedule", "--nodes", "3"],
        ["bench", "balancers", "--draws", "2"],
        ["bench", "schedule", "--draws", "2", "--nodes", "2"],
        ["doctor"],
    ],
)
def test_a_dash_sends_json_lines_to_stdout_and_tables_to_stderr(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(*arguments, "--json", "-")
    assert done.exit_code == 0, done.output
    assert all(isinstance(json.loads(line), dict) for line in done.stdout.splitlines())
    assert done.stdout
    assert done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        ({"torch": "2.13.0"}, "needs transformers 5.9 or newer; installed is transformers not at all: pip install"),
        ({"torch": "2.10.0+cpu", "transformers": "5.9.1"}, "needs torch 2.11 or newer; installed is torch 2.10.0+cpu"),
    ],
)
def test_train_says_at_once_what_it_needs(packages, message, monkeypatch):
    monkeypatch.setattr("fusco.core.requirements.installed", lambda name: packages.get(name, ""))
    monkeypatch.setitem(sys.modules, "fusco.bench.train.job", None)  # nothing of this may be imported before
    done = run("train")
    assert isinstance(done.exception, RequirementError)
    assert message in str(done.exception)


def test_an_old_torch_is_refused_in_a_sentence(monkeypatch):
    check_torch.cache_clear()
    monkeypatch.setattr("fusco.core.requirements.installed", lambda name: "2.6.0+cu124")
    message = "fusco needs torch 2.7 or newer; installed is torch 2.6.0+cu124: pip install 'torch>=2.7'"
    with pytest.raises(ImportError, match=re.escape(message)):
        fusco.Communicator  # noqa: B018
    with pytest.raises(ImportError, match=r"fusco\.fsdp needs torch 2\.11 or newer"):
        check_fsdp("fusco.fsdp", ("torch",))
    done = run("plan")
    assert isinstance(done.exception, RequirementError)
    assert str(done.exception) == message


def test_bench_schedule_says_which_figures_are_constants(capsys):
    output = run("bench", "schedule", "--draws", "2", "--nodes", "4").stdout
    assert "FAST*" in output
    assert "* not measured here: constants of another machine" in output


@pytest.mark.parametrize(("local_rank", "seconds"), [(None, []), ("0", []), ("1", [5.0])])
def test_ranks_of_a_launcher_let_the_first_one_tell(local_rank, seconds, monkeypatch, capsys):
    slept = []
    monkeypatch.setattr(main.time, "sleep", slept.append)
    monkeypatch.setattr(sys, "argv", ["fusco", "plan", "--num-experts", "30"])
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit) as exited:
        main.run()
    assert exited.value.code == 2
    assert slept == seconds
    assert "error: 30 experts do not divide" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "text"])
def test_rails_leaves_a_file_that_is_not_a_board(content, tmp_path, monkeypatch, capsys):
    path = tmp_path / "board"
    path.write_text(content)
    monkeypatch.setattr(sys, "argv", ["fusco", "rails", "--once", "--board", str(path)])
    with pytest.raises(SystemExit) as exited:
        main.run()
    assert exited.value.code == 2
    assert re.search(r"not a board of rails", capsys.readouterr().err)
    assert path.read_text() == content


def test_rails_without_a_terminal_prints_every_look(monkeypatch, tmp_path):
    looks = []

    def sleep(seconds):
        if len(looks) == 2:
            raise OSError("seen enough")
        looks.append(seconds)

    monkeypatch.setattr("time.sleep", sleep)
    with closing(Board(tmp_path / "board")):
        output = run("rails", "--board", str(tmp_path / "board")).output
    assert output.count("no worker is registered") == 2


def test_a_chart_needs_no_unicode(monkeypatch):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "argv", ["fusco", "schedule", "--matrix", "zipf"])
    monkeypatch.setattr(sys, "stdout", shown)
    with pytest.raises(SystemExit) as exited:
        main.run()
    assert not exited.value.code
    assert re.search(rb"^0  .*111\?+", shown.buffer.getvalue(), re.MULTILINE)


def test_no_columns_are_none_given(monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    assert "lower bound" in run("schedule").output


def test_an_interrupted_import_is_no_traceback():
    script = """
import builtins, sys
load = builtins.__import__
def interrupted(name, *rest):
    if name == "typer":
        raise KeyboardInterrupt
    return load(name, *rest)
builtins.__import__ = interrupted
from fusco.__main__ import run
run()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.fixture(scope="module")
def without_torch():
    with ForkedInterpreter("from fusco.cli.main import run") as interpreter:
        yield interpreter


@pytest.mark.parametrize(
    "arguments",
    [
        "bench shuffle --tokens -1",
        "bench shuffle --traffic rush-hour",
        "bench shuffle --variants best",
        "bench shuffle --num-topk 200",
        "bench shuffle --traffic uniform --layer 3",
        "bench shuffle --num-sms 4",
        "bench alltoall --matrix rush-hour",
        "bench decode --tokens 0",
        "bench host --num-topk 300",
        "bench balance --ranks many",
        "plan --num-topk 200",
        "simulate --cluster nope",
        "simulate --systems nope",
        "simulate --nodes 0",
        "simulate --traffic zipf --sweep-skew steep",
        "simulate --traffic trace --nodes 200",
        "simulate --num-topk 200",
        "train --keep-last 2",
        "warm-up --arch volta",
    ],
)
def test_wrong_values_are_refused_before_torch_is_imported(arguments, without_torch):
    """In a process of its own, as this one has torch."""
    code = """
try:
    run()
finally:
    assert "torch" not in sys.modules, "torch was imported"
"""
    (done,) = without_torch.run(code, arguments.split())
    assert done.code == 2, done.stderr
    assert done.stderr.startswith("error: ")
