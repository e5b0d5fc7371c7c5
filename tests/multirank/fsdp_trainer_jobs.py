"""Functions on ranks: transformers' Trainer, and TRL's, with a model that fusco moves tokens of."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from fsdp_models import SEQUENCE, Batch, loss_sum, make_batch, make_model, num_targets, step_alone, together
from fsdp_runs import LIMIT_S, mesh_of, whole_of
from torch import nn

from fusco import Settings, fsdp

_SETTINGS = Settings(timeout_s=LIMIT_S, slice_bytes=1 << 16)
# Of TrainingArguments. Steps are of 4 sequences whatever the number of ranks; an epoch has 3 steps.
_OPTIONS = {
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "learning_rate": 1e-2,
    "max_grad_norm": 1.0,
    "weight_decay": 0.1,
    "max_steps": 7,
    "seed": 3,
}
_NUM_SEQUENCES, _SEQUENCES_PER_STEP = 12, 4


class Sequences(torch.utils.data.Dataset):
    """Random sequences, some of whose labels are ignored in training. Trainer averages evaluations over batches."""

    def __init__(self, seed: int, num_sequences: int = _NUM_SEQUENCES, *, is_evaluated: bool = False) -> None:
        batch = make_batch(seed, num_sequences)
        self.ids, self.labels = batch.ids, batch.ids if is_evaluated else batch.labels

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[idx], "labels": self.labels[idx]}


def write_model(path: Path, **changes: Any) -> None:
    """Write the model that all ranks load."""
    make_model("qwen3", **changes).save_pretrained(path)


@contextlib.contextmanager
def as_launched() -> Iterator[None]:
    """Set what torchrun tells accelerate; its state is made anew."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    state = importlib.import_module("accelerate.state")
    with mock.patch.dict(os.environ, {**names, "ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1"}):
        if size == "1":
            os.environ.pop("LOCAL_RANK")
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
        yield


@contextlib.contextmanager
def loaded(path: Path) -> Iterator[nn.Module]:
    """Yield the model of a folder: distributed by transformers, or plain on one rank."""
    if dist.get_world_size() == 1:
        yield transformers.AutoModelForCausalLM.from_pretrained(path)
        return
    config = importlib.import_module("transformers.distributed").DistributedConfig(
        fsdp_size=dist.get_world_size(), ep_size=2, ep_implementation="fusco"
    )
    with fsdp.registered_with_transformers(_SEQUENCES_PER_STEP * SEQUENCE, settings=_SETTINGS):
        yield transformers.AutoModelForCausalLM.from_pretrained(path, distributed_config=config)


def make_trainer(model: nn.Module, folder: Path, **changes: Any) -> transformers.Trainer:
    options = {**_OPTIONS, **changes}
    accumulates = options.get("gradient_accumulation_steps", 1)
    size = _SEQUENCES_PER_STEP // accumulates // dist.get_world_size()
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=size, per_device_eval_batch_size=2, **options
    )
    return transformers.Trainer(
        model, arguments, train_dataset=Sequences(1), eval_dataset=Sequences(2, 8, is_evaluated=True)
    )


def logs_of_training(
    _: dist.ProcessGroup, path: Path, folder: Path, lora: dict[str, Any] | None = None, **changes: Any
) -> list[dict[str, float]]:
    """Return loss and norm of every step, and the loss of an evaluation after the last."""
    with as_launched(), loaded(path) as plain:
        model = _adapt(plain, **lora) if lora else plain
        trainer = make_trainer(model, folder, **changes)
        trainer.train()
        evaluated = trainer.evaluate()
        steps = [_shown(each, "loss", "grad_norm") for each in trainer.state.log_history if "loss" in each]
        return [*steps, {"eval_loss": evaluated["eval_loss"]}]


def _adapt(model: nn.Module, **options: Any) -> nn.Module:
    peft = importlib.import_module("peft")
    torch.manual_seed(dist.get_rank())  # Trainer sends the adapters of rank 0 to the others
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=2, init_lora_weights=False, **options))
    if dist.get_world_size() > 1:
        fsdp.distribute_adapters(model)
    return model


def errors_of_other_loops(_: dist.ProcessGroup, folder: Path) -> list[str]:
    """Return what Trainer, accelerate and ``distribute_adapters`` say about models that are not for them."""
    mesh = mesh_of(2, 1)
    model, accelerate = make_model("qwen3"), importlib.import_module("accelerate")
    errors = []
    with pytest.raises(ValueError, match="no experts") as error:
        fsdp.distribute_adapters(model)
    errors.append(str(error.value))
    fsdp.parallelize(model, mesh, fsdp.TorchDispatcher(mesh.ep_group))
    with as_launched(), pytest.raises(TypeError, match="cannot wrap") as error:
        make_trainer(model, folder).train()
    errors.append(str(error.value))
    with as_launched(), pytest.raises(TypeError, match="cannot wrap") as error:
        accelerate.Accelerator(cpu=True).prepare(model)
    return [*errors, str(error.value)]


def weights_of_run(
    _: dist.ProcessGroup,
    path: Path,
    folder: Path,
    stop_after: tuple[int, ...],
    lora: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Train, interrupted after each of these steps; return the last weights, and the log of all steps."""
    for last in (*stop_after, None):
        with as_launched(), loaded(path) as plain:
            model = _adapt(plain, **lora) if lora else plain
            trainer = make_trainer(model, folder / "trainer", **changes)
            if last:
                trainer.add_callback(_Stop(last))
            checkpoint = fsdp.TrainerCheckpoint(folder / "run", every=2, keep_last=2)
            checkpoint.train(trainer)
            weights = {name: whole_of(tensor) for name, tensor in model.named_parameters()}
            history = [each for each in trainer.state.log_history if "loss" in each]
    return weights, [_shown(each, "step", "loss", "grad_norm", "learning_rate") for each in history]


def run_snippets(_: dist.ProcessGroup, snippets: list[str], folder: Path) -> list[dict[str, float]]:
    """Run the snippets of the page on Trainer; return the log of the last."""
    scope = {"fsdp": fsdp, "transformers": transformers, "num_ranks": dist.get_world_size()}
    scope |= {name: folder / name for name in ("base", "output", "run", "exported")}
    scope |= {
        "train_data": Sequences(1),
        "eval_data": Sequences(2, 8),
        "options": {"use_cpu": True, "logging_steps": 1},
    }
    with as_launched():
        for snippet in snippets:
            exec(snippet, scope)
    return scope["trainer"].state.log_history


def difference_of_lightning(_: dist.ProcessGroup, snippet: str) -> float:
    """Run a snippet of the page for three steps; return by how much weights differ from those of one process."""
    nums, steps = (2, 1, 3, 1), range(3)
    batches = [make_batch(dist.get_rank(), nums[dist.get_rank()], step) for step in steps]
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    mesh, model, alone = mesh_of(2, 1), make_model("qwen3"), make_model("qwen3")
    with fsdp.FuscoDispatcher(mesh.ep_group, max(nums) * SEQUENCE, settings=_SETTINGS) as dispatcher, as_launched():
        scope = {"fsdp": fsdp, "torch": torch, "lightning": importlib.import_module("lightning"), "mesh": mesh}
        scope |= {"model": model, "dispatcher": dispatcher, "num_ranks": dist.get_world_size()}
        scope |= {"strategies": importlib.import_module("lightning.fabric.strategies")}
        scope |= {"loss_sum": lambda model, batch: loss_sum(model, Batch(*batch))}
        scope |= {"num_targets": lambda batch: num_targets(Batch(*batch))}
        is_fabric = "lightning.Fabric" in snippet
        options = {} if is_fabric else {**options, "use_distributed_sampler": False}
        scope |= {"options": {**options, "accelerator": "cpu"}}
        scope |= {
            "batches": torch.utils.data.DataLoader([(each.ids, each.labels) for each in batches], batch_size=None)
        }
        with mock.patch.dict(os.environ, {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}):
            exec(snippet, scope)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    for index in steps:
        step_alone(alone, together(nums, index))
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max(float((whole_of(ours) - theirs.detach()).abs().max()) for ours, theirs in pairs)


def write_tokenizer(path: Path) -> None:
    """Write a tokenizer for trainers that want one."""
    tokenizers = importlib.import_module("tokenizers")
    words = tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(path)


def logs_of_trl(_: dist.ProcessGroup, path: Path, folder: Path, *stop_after: int) -> list[dict[str, float]]:
    """Return loss, norm and router loss of every step of TRL's trainer, interrupted after some steps."""
    trl, datasets = (importlib.import_module(name) for name in ("trl", "datasets"))
    data = [{key: each.tolist() for key, each in sequence.items()} for sequence in Sequences(1)]
    options = {**_OPTIONS, "dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None, "bf16": False}
    size = _SEQUENCES_PER_STEP // dist.get_world_size()
    run = folder / f"run-{len(stop_after)}"
    for last in (*stop_after, None):
        with as_launched(), loaded(path) as model:
            trainer = trl.SFTTrainer(
                model,
                trl.SFTConfig(folder, per_device_train_batch_size=size, **options),
                train_dataset=datasets.Dataset.from_list(data),
                processing_class=transformers.AutoTokenizer.from_pretrained(path),
            )
            if last:
                trainer.add_callback(_Stop(last))
            fsdp.TrainerCheckpoint(run, every=2).train(trainer)
            history = [each for each in trainer.state.log_history if "loss" in each]
    return [_shown(each, "loss", "grad_norm", "aux_loss") for each in history]


def errors_of_checkpoints(_: dist.ProcessGroup, path: Path, folder: Path) -> list[str]:
    """Return errors for a trainer that the callback has not started, and for a transformers without its methods."""
    errors: list[str] = []
    with as_launched(), loaded(path) as model:
        checkpoint = fsdp.TrainerCheckpoint(folder / "run", every=1)
        trainer = make_trainer(model, folder / "trainer", max_steps=1)
        trainer.add_callback(checkpoint)
        with pytest.raises(RuntimeError) as error:
            trainer.train()
        errors.append(str(error.value))
        checkpoint.train(trainer)
        with mock.patch.object(transformers.Trainer, "_load_rng_state", None), pytest.raises(RuntimeError) as error:
            checkpoint.train(trainer)
        errors.append(str(error.value))
    return errors


class _Stop(transformers.TrainerCallback):
    """Ends a training, which is saved then."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if state.global_step == self.step:
            control.should_training_stop = True
        return control


def _shown(logged: dict[str, float], *keys: str) -> dict[str, float]:
    return {key: logged[key] for key in keys}
