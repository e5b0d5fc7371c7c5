"""Options of ``fusco train`` that define a run, are kept in the folder it is saved in, and are taken up by --resume."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from fusco.bench.harness.json_lines import write_json_lines
from fusco.bench.names import STDOUT
from fusco.cli import options
from fusco.cli.options import Device
from fusco.core.files import written_beside
from fusco.core.requirements import RequirementError, installed

_Options = TypeVar("_Options")
_FILE = "options.json"  # in the folder of a run
# Options with which a run can be continued although it was begun with others. All others change what it learns.
_CHANGEABLE = {
    *("device", "ranks", "ep_size", "steps", "dispatcher", "activation_checkpointing", "timeout_s"),
    *("save", "save_every", "keep_last", "resume", "export", "eval_every", "sample_tokens"),
}
PresetName = Literal["small", "large"]
# For each size, its values in small and large. Small takes 200 steps on four processes of two cores in about two
# minutes; large, for GPUs, has a sixth of the layers of Qwen3-30B-A3B and half of its experts.
_SIZES: dict[str, tuple[Any, Any]] = {
    "layers": (4, 8),
    "hidden": (128, 2048),
    "num_experts": (16, 64),
    "num_topk": (4, 8),
    "moe_intermediate": (128, 768),
    "tokens": (512, 8192),
    "length": (128, 2048),
    "lr": (3e-3, 3e-4),
    "warmup_steps": (0, 20),
    "dtype": ("float32", "bfloat16"),
}


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options that define a run, but for sizes."""

    preset: Annotated[PresetName, typer.Option(help="Sizes to start from; large is for GPUs.")] = "small"
    device: Annotated[Device, typer.Option(help="Where ranks compute.")] = "cpu"
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes. Default: 4, on CUDA one for each GPU.")] = None
    ep_size: Annotated[int, typer.Option(min=1, help="Ranks among which experts are distributed.")] = 2
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 200
    architecture: Annotated[
        Literal["qwen3_moe", "glm4_moe"], typer.Option(help="Kind of model; glm4_moe has a bias for each expert.")
    ] = "qwen3_moe"
    model: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of a model of transformers to start from; sets sizes."),
    ] = None
    router_loss: Annotated[
        float | None,
        typer.Option(
            min=0, help="Weight of the loss that evens out the experts' loads. Default: 0.01 for qwen3_moe, else 0."
        ),
    ] = None
    balance_rate: Annotated[
        float,
        typer.Option(min=0, help="Step by which biases of experts follow their loads, without a loss (glm4_moe)."),
    ] = 0.0
    forced_balance: Annotated[
        bool, typer.Option("--forced-balance", help="Send tokens to experts in turn, to measure even loads.")
    ] = False
    balance: Annotated[bool, typer.Option("--balance", help="Copy busy experts to spare places for every batch.")] = (
        False
    )
    spare_places: options.SparePlacesOfBatch = 2
    dropout: Annotated[float, typer.Option(min=0, max=0.99, help="Dropout of attention probabilities.")] = 0.0
    dispatcher: Annotated[
        Literal["fusco", "torch", "both"],
        typer.Option(help="What moves tokens; both: one run each from the same weights, compared."),
    ] = "fusco"
    activation_checkpointing: Annotated[
        Literal["none", "full", "selective"],
        typer.Option(help="What blocks recompute in the backward pass: nothing, all, all but dispatch and combine."),
    ] = "none"
    text: Annotated[
        Path | None,
        typer.Option(help="File or directory to train on, one token per byte. Default: this machine's Python sources."),
    ] = None
    text_bytes: Annotated[int, typer.Option(min=1, help="Maximum bytes of the text.")] = 32 << 20
    eval_every: Annotated[int, typer.Option(min=1, help="Steps between losses of held-out text.")] = 25
    sample_tokens: Annotated[int, typer.Option(min=0, help="Tokens that the model writes at the end.")] = 64
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and batches.")] = 0
    timeout_s: options.Timeout = 60.0


@dataclass(frozen=True, kw_only=True)
class SavingOptions:
    """Options that say what is saved of a run."""

    save: Annotated[Path | None, typer.Option(file_okay=False, help="Save the run in this folder, to --resume.")] = None
    save_every: Annotated[int | None, typer.Option(min=1, help="Steps between saves. Default: at the end only.")] = None
    keep_last: Annotated[int | None, typer.Option(min=1, help="Saves to keep. Default: all.")] = None
    export: Annotated[
        Path | None, typer.Option(file_okay=False, help="Write the model here at the end, for from_pretrained.")
    ] = None
    resume: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Continue the run saved in this folder, with its options."),
    ] = None

    @property
    def folder(self) -> Path | None:
        """The folder that the run is saved in."""
        return self.resume or self.save

    def check(self, dispatcher: str) -> None:
        """Raise ``ValueError`` for options that do not go together."""
        if self.resume and self.save and self.resume.resolve() != self.save.resolve():
            raise ValueError(f"--resume {self.resume} saves into its own folder, not into --save {self.save}")
        if not self.folder and (self.save_every or self.keep_last):
            raise ValueError("--save-every and --keep-last go with --save FOLDER")
        if self.folder and dispatcher == "both":
            raise ValueError("--dispatcher both makes two runs, but one is saved in a folder: choose one dispatcher")


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Files that a run writes beside its saves."""

    record_trace: Annotated[
        Path | None, options.written_file("Write the last step's routing here (npz or npy), for fusco bench --trace.")
    ] = None
    plot: Annotated[Path | None, options.written_file("Write the curves of losses here, as SVG.")] = None
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.csv|FILE.jsonl|FOLDER|wandb",
            help="Write metrics of each step here, too; a folder is TensorBoard's. Several with commas, or repeated.",
        ),
    ] = None

    def metric_targets(self, dispatcher: str, *, resumes: bool) -> tuple[str, ...]:
        """Return where metrics are written, with whole paths.

        Raises ``RequirementError`` for a package that is missing, ``ValueError`` for what cannot be written.
        """
        if self.metrics and dispatcher == "both":
            raise ValueError("--dispatcher both makes two runs, but --metrics are of one: choose one dispatcher")
        targets = options.choose_names(self.metrics, [], "metrics") if self.metrics else []
        return tuple(_metric_target(target, resumes) for target in targets)


def _metric_target(target: str, resumes: bool) -> str:
    path, suffix = Path(target), Path(target).suffix
    if suffix not in ("", ".csv", ".jsonl"):
        raise ValueError(f"--metrics {target} is none of FILE.csv, FILE.jsonl, a folder for TensorBoard, wandb")
    package = "" if suffix else "wandb" if target == "wandb" else "tensorboard"
    if package and not installed(package):
        raise RequirementError(f"--metrics {target} needs the package {package}: pip install {package}")
    if resumes and suffix == ".csv" and path.exists():
        raise ValueError(f"--metrics {target} has steps, and a CSV file is begun anew: choose another for --resume")
    if package != "wandb":
        options.check_writable(path)
    return target if package == "wandb" else str(path.resolve())


def write_options(folder: Path, groups: Collection[Any]) -> None:
    """Write the options of a new run into its folder; ``ValueError`` if another run is in it."""
    if folder.is_dir() and (next(folder.glob("step-*"), None) is not None):
        raise ValueError(f"{folder} has saved steps: continue with --resume {folder}, or save into another folder")
    folder.mkdir(parents=True, exist_ok=True)
    chosen = {name: value for group in groups for name, value in asdict(group).items()}
    with written_beside(folder / _FILE) as beside:
        beside.write_text(json.dumps(chosen, default=str, indent=1), encoding="utf-8")


def take_up(folder: Path, group: _Options, given: Collection[str]) -> _Options:
    """Return a group of options with the values of the run in a folder.

    Those of ``given``, by name, replace them where a run can be continued with others.

    Raises ``ValueError`` for a folder without options, and for another value of an option that changes the run.
    """
    try:
        saved: dict[str, Any] = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{folder} has no {_FILE}: it is not a folder that fusco train --save wrote") from error
    values = {}
    for each in fields(group):  # type: ignore[arg-type]  # a dataclass, which no protocol says
        name, value = each.name, getattr(group, each.name)
        before = saved.get(name, each.default)
        if name in ("text", "model", "export", "save", "resume") and before is not None:
            before = Path(before)
        if name in given and name not in _CHANGEABLE and value != before:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} {value} does not continue the run in {folder}, which has {option} {before}")
        values[name] = value if name in given else before
    return type(group)(**values)


def num_steps_of(saved: Path | None) -> int:
    """Return the number of finished steps in the folder of a saved step, which its name has."""
    return 0 if saved is None else int(saved.name.split("-")[1])


def keep_steps(path: Path, saved: Path | None) -> None:
    """Empty a file of JSON lines, but for the records of the steps in the run that is continued."""
    kept = []
    if saved and path != STDOUT and path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record.get("kind") == "step" and record["step"] < num_steps_of(saved):
                kept.append(line + "\n")
    write_json_lines([], path)
    if kept:
        path.write_text("".join(kept), encoding="utf-8")


def _size(what: str, name: str, least: int | None = 1) -> Any:
    """Return the option of a size, whose help names the defaults."""
    small, large = _SIZES[name]
    return typer.Option(min=least, help=f"{what} Default: {small}, in large {large}.")


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """Options that change a preset; ``None`` means not given."""

    layers: Annotated[int | None, _size("Blocks.", "layers")] = None
    hidden: Annotated[int | None, _size("Elements of a row.", "hidden")] = None
    num_experts: Annotated[int | None, _size("Experts of a layer.", "num_experts")] = None
    num_topk: Annotated[int | None, _size("Experts per token.", "num_topk")] = None
    moe_intermediate: Annotated[int | None, _size("Inner width of an expert.", "moe_intermediate")] = None
    tokens: Annotated[int | None, _size("Tokens of each rank in a step.", "tokens")] = None
    length: Annotated[int | None, _size("Tokens of a sequence.", "length")] = None
    lr: Annotated[float | None, _size("Learning rate of AdamW.", "lr", 0)] = None
    warmup_steps: Annotated[int | None, _size("Steps of linear warm-up.", "warmup_steps", 0)] = None
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None, _size("Computed in; parameters stay in float32.", "dtype", None)
    ] = None

    def arguments(self, preset: PresetName) -> dict[str, Any]:
        """Return the arguments of ``TrainingJob`` that are sizes: those given, and the preset's."""
        from fusco.bench.train.job import byte_model

        given = {field.name: getattr(self, field.name) for field in fields(self)}
        sizes = {name: of[preset == "large"] if given[name] is None else given[name] for name, of in _SIZES.items()}
        of_model = ("hidden", "num_experts", "num_topk", "moe_intermediate")
        shape = byte_model(num_layers=sizes.pop("layers"), **{name: sizes.pop(name) for name in of_model})
        return {"shape": shape, "learning_rate": sizes.pop("lr"), **sizes}
