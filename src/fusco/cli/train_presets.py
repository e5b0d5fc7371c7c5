"""Presets of sizes for ``fusco train``, and the options that change them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

if TYPE_CHECKING:
    from fusco.fsdp.qwen3 import Qwen3Shape

PresetName = Literal["small", "large"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Sizes, each with the name of its option; the defaults are those of small."""

    layers: int = 4
    hidden: int = 128
    num_experts: int = 16
    num_topk: int = 4
    moe_intermediate: int = 128
    tokens: int = 512
    length: int = 128
    lr: float = 3e-3
    warmup_steps: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"

    def changed(self, **given: Any) -> Preset:
        """Return the preset with the user's values; ``None`` means not given."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def shape(self) -> Qwen3Shape:
        """Return the sizes of the model."""
        from fusco.train.job import byte_model

        return byte_model(
            num_layers=self.layers,
            hidden=self.hidden,
            num_experts=self.num_experts,
            num_topk=self.num_topk,
            moe_intermediate=self.moe_intermediate,
        )


PRESETS: dict[PresetName, Preset] = {
    # 200 steps on four processes of two cores in about two minutes.
    "small": Preset(),
    # For GPUs: a sixth of the layers of Qwen3-30B-A3B and half of its experts.
    "large": Preset(
        layers=8,
        hidden=2048,
        num_experts=64,
        num_topk=8,
        moe_intermediate=768,
        tokens=8192,
        length=2048,
        lr=3e-4,
        warmup_steps=20,
        dtype="bfloat16",
    ),
}


def _size(what: str, name: str, smallest: int = 1) -> Any:
    """Return the option of a size, whose help names the defaults."""
    small, large = (getattr(PRESETS[preset], name) for preset in get_args(PresetName))
    least = None if isinstance(small, str) else smallest
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
        Literal["bfloat16", "float32"] | None, _size("Computed in; parameters stay in float32.", "dtype")
    ] = None
