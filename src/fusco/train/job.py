"""Configuration of ``fusco train``, validated before any process is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fusco.fsdp.activation_checkpointing import Checkpointing

_HEAD_DIM = 32


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a Qwen3-MoE whose tokens are bytes; every layer has experts.

    Raises:
        ValueError: for sizes that do not fit together.
    """

    num_layers: int  # blocks
    hidden: int  # elements of a token's row; a multiple of 32
    num_experts: int  # of each layer
    num_topk: int  # experts per token (top-k)
    moe_intermediate: int  # inner width of an expert

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden", "num_experts", "num_topk", "moe_intermediate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.hidden % _HEAD_DIM:
            raise ValueError(f"hidden must be a multiple of {_HEAD_DIM}, got {self.hidden}")
        if self.num_topk > self.num_experts:
            raise ValueError(f"a token cannot have {self.num_topk} different ones of {self.num_experts} experts")

    @property
    def head_dim(self) -> int:
        """Elements of an attention head: 128 if at least four such heads fit, else 32."""
        return 128 if self.hidden % 128 == 0 and self.hidden >= 4 * 128 else _HEAD_DIM

    @property
    def num_heads(self) -> int:
        """Attention heads."""
        return self.hidden // self.head_dim

    @property
    def num_key_value_heads(self) -> int:
        """Heads of keys and values: one for two attention heads."""
        return self.num_heads // 2 if self.num_heads % 2 == 0 else self.num_heads


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A training run.

    Raises:
        ValueError: for values that do not fit together.
    """

    shape: ModelShape  # of the model
    device: Literal["cpu", "cuda"] = "cpu"  # ``"cpu"``, or ``"cuda"`` with one rank per GPU
    num_ranks: int = 4  # processes
    ep_size: int = 2  # number of ranks over which a layer's experts are distributed
    tokens: int  # of each rank in each step
    length: int  # of a sequence; divides ``tokens``
    num_steps: int = 200  # optimizer steps
    learning_rate: float  # of AdamW
    warmup_steps: int = 0  # steps of linear learning-rate warm-up; 0 for none
    router_loss: float = 0.01  # weight of ``balance_loss``, which evens out the experts' loads
    # ``"fusco"`` or ``"torch"``, one run each, from the same weights and data
    dispatchers: tuple[str, ...] = ("fusco",)
    activation_checkpointing: Checkpointing = "none"  # as for ``fusco.fsdp.parallelize``
    # ``"float32"``; or ``"bfloat16"`` for computation, while parameters, accumulated gradients and the optimizer stay
    # in float32
    dtype: Literal["float32", "bfloat16"]
    seed: int = 0  # of weights and batches
    text: Path | None = None  # a file or directory to train on; ``None`` means the Python sources of this machine
    text_bytes: int = 32 << 20  # maximum number of bytes of the text
    timeout_s: float = 60.0  # the limit of every wait in fusco, in seconds

    def __post_init__(self) -> None:
        for name in ("num_ranks", "ep_size", "tokens", "length", "num_steps", "learning_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("router_loss", "warmup_steps"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.num_ranks % self.ep_size:
            raise ValueError(f"ep_size={self.ep_size} does not divide the {self.num_ranks} ranks")
        if self.shape.num_experts % self.ep_size:
            raise ValueError(f"ep_size={self.ep_size} does not divide the {self.shape.num_experts} experts of a layer")
        num_sharing = self.num_ranks // self.ep_size
        for name, size in (("moe_intermediate", 2 * self.shape.moe_intermediate), ("hidden", self.shape.hidden)):
            if size % num_sharing:
                raise ValueError(
                    f"the {num_sharing} ranks that share an expert ({self.num_ranks} ranks, ep_size={self.ep_size}) "
                    f"cannot shard it evenly with {name}={getattr(self.shape, name)}"
                )
        if self.tokens % self.length:
            raise ValueError(f"sequences of length {self.length} do not divide the {self.tokens} tokens of a rank")

    @property
    def num_sequences(self) -> int:
        """Sequences of each rank in each step."""
        return self.tokens // self.length

    @property
    def bytes_per_step(self) -> int:
        """Bytes of text that one step of all ranks reads."""
        return self.num_ranks * self.num_sequences * (self.length + 1)
