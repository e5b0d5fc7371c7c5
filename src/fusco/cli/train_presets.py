"""Presets of sizes for ``fusco train``, and the options that change them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import typer

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
