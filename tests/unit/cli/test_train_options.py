"""``fusco train`` without ranks: presets that go together, names of the library, what is said of steps."""

import io
import re
import time
from typing import get_args, get_type_hints

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fusco.bench.ranks import torchrun
from fusco.bench.ranks.torchrun import Launched
from fusco.bench.train import text
from fusco.bench.train.job import TrainingJob
from fusco.cli import running, train as cli_train, train_options
from fusco.cli.main import app
from fusco.cli.options import Device
from fusco.cli.running import Interrupted, StepProgress
from fusco.cli.train_options import FileOptions, PresetName, RunOptions, SizeOptions
from fusco.cpu.kernels.warm_up import warm_up_cpu


def test_option_names_are_those_of_the_library():
    options, job = get_type_hints(RunOptions) | get_type_hints(SizeOptions), get_type_hints(TrainingJob)
    assert get_args(options["activation_checkpointing"]) == get_args(job["activation_checkpointing"])
    (dtypes, _) = get_args(options["dtype"])
    assert set(get_args(dtypes)) == set(get_args(job["dtype"]))
    assert set(get_args(Device)) == set(get_args(job["device"]))


def test_only_known_names_are_taken():
    done = CliRunner().invoke(app, ["train", "--activation-checkpointing", "some"])
    assert done.exit_code == 2
    assert all(name in done.output for name in ("'none'", "'full'", "'selective'"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs"], "--metrics runs needs the package tensorboard: pip install tensorboard"),
        (["steps.csv,wandb"], "--metrics wandb needs the package wandb: pip install wandb"),
        (["steps.txt"], "--metrics steps.txt is none of FILE.csv, FILE.jsonl, a folder for TensorBoard, wandb"),
        (["steps.csv", "--dispatcher", "both"], "--metrics are of one: choose one dispatcher"),
    ],
)
def test_metrics_that_cannot_be_written_are_refused_before_anything_starts(arguments, message, monkeypatch):
    pytest.importorskip("transformers", reason="fusco train needs it")
    monkeypatch.setattr(cli_train, "run_on_ranks", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr(train_options, "installed", lambda _: "")
    done = CliRunner().invoke(app, ["train", "--metrics", *arguments])
    assert message in str(done.exception)


def test_a_csv_file_with_steps_is_not_begun_anew_by_a_run_that_goes_on(tmp_path):
    written = tmp_path / "steps.csv"
    written.write_text("step,loss\n1,5.5\n")
    with pytest.raises(ValueError, match=r"steps\.csv has steps, and a CSV file is begun anew"):
        FileOptions(metrics=[str(written)]).metric_targets("fusco", resumes=True)
    assert FileOptions(metrics=[str(written)]).metric_targets("fusco", resumes=False) == (str(written),)


@pytest.mark.parametrize("name", get_args(PresetName))
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_presets_go_together_on_four_ranks(name, ep_size):
    job = TrainingJob(num_ranks=4, ep_size=ep_size, **SizeOptions().arguments(name))
    assert job.num_sequences * job.length == job.tokens


def test_a_rank_of_torchrun_leaves_reading_the_text_to_its_training(monkeypatch):
    pytest.importorskip("transformers", reason="fusco train needs it")
    monkeypatch.setattr(torchrun, "launched", lambda: Launched(1, 2, 1, 2))
    monkeypatch.setattr(cli_train, "run_on_ranks", lambda *_, **__: None)
    monkeypatch.setattr(text, "load_text", lambda job: pytest.fail("read twice"))
    done = CliRunner().invoke(app, ["train"])
    assert done.exit_code == 0, done.exception


@pytest.mark.parametrize(
    ("steps", "said"), [("", ""), ('{"kind": "step"}\n', "; the steps until then are in {}")], ids=["none", "one"]
)
def test_an_interrupted_run_names_its_file_if_there_are_steps_in_it(steps, said, tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="fusco train needs it")
    out = tmp_path / "train.jsonl"

    def interrupted(*_, **__):
        out.write_text(steps)
        raise Interrupted

    monkeypatch.setattr(cli_train, "run_on_ranks", interrupted)
    with pytest.raises(Interrupted) as interrupt:
        CliRunner().invoke(app, ["train", "--json", str(out)])
    assert str(interrupt.value) == said.format(out)


def test_the_latest_step_is_shown_whole_below_the_bar():
    step = (
        "fusco, step 12: loss 3.123, 122,239 tokens/s, dispatch and combine 12%, busiest expert 1.23 x mean, "
        "and the rest"
    )
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None, _environ={})
    progress = StepProgress(console)
    progress.add_task(step, total=200, completed=12)
    console.print(progress.get_renderable())
    bar, *lines = console.file.getvalue().splitlines()
    assert "12/200" in bar
    assert " ".join(" ".join(lines).split()) == step


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_log_has_a_line_on_progress_every_few_seconds(is_terminal, monkeypatch, capsys):
    monkeypatch.setattr(running, "_LINE_S", 0.05)
    progress = StepProgress(Console(file=io.StringIO(), force_terminal=is_terminal))
    progress.add_task("compiling kernels (once)", total=20, completed=12)
    with progress.lines_in_logs():
        time.sleep(0.5)
    lines = capsys.readouterr().err.splitlines()
    assert bool(lines) is not is_terminal
    assert all(re.fullmatch(r"fusco: compiling kernels \(once\), 12 of 20, after \d s", line) for line in lines)


def test_compiling_kernels_counts_its_steps():
    steps = []
    warm_up_cpu(lambda *step: steps.append(step))
    assert steps == [(number, len(steps)) for number in range(1, len(steps) + 1)]
    assert len(steps) > 10


def test_the_large_preset_is_what_it_is_said_to_be():
    large = SizeOptions().arguments("large")
    assert (large["tokens"], large["length"], large["dtype"], large["warmup_steps"]) == (8192, 2048, "bfloat16", 20)
    shape = large["shape"]
    assert (shape.num_experts, shape.num_topk, shape.hidden, shape.num_layers) == (64, 8, 2048, 8)


def test_given_sizes_replace_those_of_a_preset():
    sizes = SizeOptions(layers=2, lr=0.5, warmup_steps=0).arguments("large")
    assert (sizes["shape"].num_layers, sizes["learning_rate"], sizes["warmup_steps"]) == (2, 0.5, 0)
    assert (sizes["shape"].hidden, sizes["tokens"]) == (2048, 8192)
