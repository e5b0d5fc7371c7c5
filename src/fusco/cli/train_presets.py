"""Presets of sizes for ``fusco train``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fusco.train.job import ModelShape

PresetName = Literal["small", "large"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Sizes, each with the name of its option."""

    layers: int
    hidden: int
    num_experts: int
    num_topk: int
    moe_intermediate: int
    tokens: int
    length: int
    lr: float
    warmup_steps: int
    dtype: Literal["float32", "bfloat16"]

    def changed(self, **given: Any) -> Preset:
        """Return the preset with the user's values; ``None`` means not given."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def shape(self) -> ModelShape:
        """Return the sizes of the model."""
        from fusco.train.job import ModelShape

        return ModelShape(
            num_layers=self.layers,
            hidden=self.hidden,
            num_experts=self.num_experts,
            num_topk=self.num_topk,
            moe_intermediate=self.moe_intermediate,
        )


PRESETS: dict[PresetName, Preset] = {
    # 200 steps on four processes of two cores in about two minutes.
    "small": Preset(
        layers=4,
        hidden=128,
        num_experts=16,
        num_topk=4,
        moe_intermediate=128,
        tokens=512,
        length=128,
        lr=3e-3,
        warmup_steps=0,
        dtype="float32",
    ),
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


def from_preset(name: str) -> str:
    """Describe an option's defaults for its help."""
    return f"Default: {getattr(PRESETS['small'], name)}, in large {getattr(PRESETS['large'], name)}."
