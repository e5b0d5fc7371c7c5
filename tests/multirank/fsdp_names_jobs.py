"""Functions on ranks: files that a parallelized model writes for transformers and reads."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from fsdp_architectures import REJECTED, UNMADE, find_roots, make_root
from fsdp_models import SEQUENCE, make_model
from fsdp_runs import LIMIT_S, mesh_of
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from fusco import Settings, fsdp
from fusco.fsdp.gathered_parts import cut_rows, with_zeros
from fusco.fsdp.hugging_face import original_class

Tensors = dict[str, torch.Tensor]


def wrong_files(_: dist.ProcessGroup, kind: str, path: Path) -> list[str]:
    """On one rank: write, reload and read every model of an architecture; return what is not as expected."""
    transformers.utils.logging.disable_progress_bar()
    faults, num_right, expects_none = [], 0, False
    for root in find_roots(kind):
        name = root.__name__
        try:
            on_meta = make_root(root, "meta")
        except Exception as error:  # noqa: BLE001  the table knows which it may be
            if UNMADE.get(name, "nothing, so give it sizes in fsdp_architectures.py") not in str(error):
                faults.append(f"{name} cannot be made: {error}")
            continue
        reasons = [text for prefix, text in REJECTED.items() if name.startswith(prefix)]
        expects_none |= bool(reasons)
        try:
            fsdp.find_experts(on_meta)  # what is rejected may be large
            model = make_root(root)
            weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
            model.save_pretrained(path / name / "plain")
            fsdp.parallelize(model, mesh_of(1, 1), fsdp.TorchDispatcher(mesh_of(1, 1).ep_group))
        except ValueError as error:
            if not re.search("|".join([*reasons, "has no module of experts: one with the parameters"]), str(error)):
                faults.append(f"{name} is rejected: {error}")
        else:
            # Of one class in the smallest parts, and in a file for each block.
            limits = (4 << 20, 1 << 30) if num_right else (0, 1)
            with mock.patch("fusco.fsdp.gathered_parts._SMALL_BYTES", limits[0]):
                faults += [f"{name}: {each}" for each in _faults(model, weights, path / name, limits[1])]
            num_right += 1
    return faults if num_right or expects_none else [f"no class of {kind} has experts"]


def _faults(model: transformers.PreTrainedModel, weights: Tensors, path: Path, max_file_bytes: int) -> list[str]:
    """Between a parallelized model and the plain one, which had these weights and was saved as ``plain``."""
    sharded_class = type(model)
    fsdp.save_hugging_face(path / "parallel", model, max_file_bytes=max_file_bytes)
    plain = load_file(path / "plain" / "model.safetensors")
    parallel: Tensors = {}
    for file in (path / "parallel").glob("*.safetensors"):
        parallel |= load_file(file)
    faults = _differences("written", parallel, plain)
    again, info = original_class(sharded_class).from_pretrained(path / "parallel", output_loading_info=True)
    faults += [
        f"{what} on reload: {sorted(info[what])[:3]}" for what in ("missing_keys", "unexpected_keys") if info[what]
    ]
    faults += _differences("reloaded", again.state_dict(), weights)
    with torch.no_grad():
        for parameter in model.parameters():
            _values(parameter).fill_(float("nan"))
    fsdp.load_hugging_face(path / "plain", model)
    read = {name: _values(tensor) for name, tensor in model.state_dict().items()}
    read |= {name: with_zeros(read[name], num_rows) for name, num_rows in cut_rows(model).items()}
    faults += _differences("read", read, weights)
    if type(model) is not sharded_class:
        faults.append("has lost the class that FSDP gave it")
    return faults


def _differences(what: str, ours: Tensors, theirs: Tensors) -> list[str]:
    if ours.keys() != theirs.keys():
        return [
            f"{what}: lacks {sorted(theirs.keys() - ours.keys())[:3]}, has {sorted(ours.keys() - theirs.keys())[:3]}"
        ]
    return [f"{what}: {name} differs" for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])][:3]


def _values(tensor: torch.Tensor | nn.Parameter) -> torch.Tensor:
    """On one rank a part is the whole."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def errors_of_names(_: dist.ProcessGroup, path: Path) -> str:
    """Return the error of an export with names that transformers does not look for."""
    mesh = mesh_of(1, 1)
    model = make_model("qwen3")
    fsdp.parallelize(model, mesh, fsdp.TorchDispatcher(mesh.ep_group))
    save_pretrained = model.save_pretrained

    def save_misnamed(path: Path, state_dict: Tensors, **options: Any) -> None:
        misnamed = {name.replace("embed_tokens", "embed"): state_dict[name] for name in state_dict}
        save_pretrained(path, state_dict=misnamed, **options)

    model.save_pretrained = save_misnamed
    with pytest.raises(ValueError, match="would not find") as error:
        fsdp.save_hugging_face(path, model)
    return str(error.value)


def export_tied(_: dist.ProcessGroup, path: Path) -> None:
    """Write a model whose output weights are its embeddings."""
    mesh = mesh_of(2, 1)
    model = make_model("qwen3", tie_word_embeddings=True)
    fsdp.parallelize(model, mesh, fsdp.TorchDispatcher(mesh.ep_group))
    fsdp.save_hugging_face(path, model)


def export_through_transformers(_: dist.ProcessGroup, path: Path, into: Path) -> str:
    """Return the error for a model that transformers has distributed; transformers then writes it."""
    config = importlib.import_module("transformers.distributed").DistributedConfig(
        fsdp_size=2, ep_size=2, ep_implementation="fusco"
    )
    with fsdp.registered_with_transformers(SEQUENCE, settings=Settings(timeout_s=LIMIT_S)):
        model = transformers.AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
        with pytest.raises(ValueError, match="distributed") as error:
            fsdp.save_hugging_face(into, model)
        assert not into.exists()
        dist.barrier()
        model.save_pretrained(into)
    return str(error.value)
