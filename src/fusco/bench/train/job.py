"""Configuration of ``fusco train``, validated before any process is started."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Literal

from fusco.fsdp.activation_checkpointing import Checkpointing
from fusco.fsdp.qwen3 import Qwen3Shape

_HEAD_DIM = 32


def byte_model(*, num_layers: int, hidden: int, num_experts: int, num_topk: int, moe_intermediate: int) -> Qwen3Shape:
    """Return the sizes of a Qwen3-MoE whose tokens are bytes; ``ValueError`` for sizes that do not fit together.

    Attention heads have 128 elements if at least four such heads fit, else 32, which ``hidden`` is a multiple of; two
    share a head of keys and values.
    """
    if hidden % _HEAD_DIM:
        raise ValueError(f"hidden must be a multiple of {_HEAD_DIM}, got {hidden}")
    head_dim = 128 if hidden % 128 == 0 and hidden >= 4 * 128 else _HEAD_DIM
    num_heads = hidden // head_dim
    return Qwen3Shape(
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        num_key_value_heads=num_heads // 2 if num_heads % 2 == 0 else num_heads,
        head_dim=head_dim,
        num_experts=num_experts,
        num_topk=num_topk,
        moe_intermediate=moe_intermediate,
        vocab=256,
    )


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A training run; ``ValueError`` for values that do not fit together."""

    shape: Qwen3Shape  # of the model
    device: Literal["cpu", "cuda"] = "cpu"  # ``"cpu"``, or ``"cuda"`` with one rank per GPU
    num_ranks: int = 4  # processes
    ep_size: int = 2  # number of ranks over which a layer's experts are distributed
    tokens: int  # of each rank in each step
    length: int  # of a sequence; divides ``tokens``
    num_steps: int = 200  # optimizer steps
    learning_rate: float  # of AdamW
    warmup_steps: int = 0  # steps of linear learning-rate warm-up; 0 for none
    router_loss: float = 0.01  # weight of ``balance_loss``, which evens out the experts' loads
    architecture: Literal["qwen3_moe", "glm4_moe"] = "qwen3_moe"  # of transformers; the latter has biases of experts
    balance_rate: float = 0.0  # of ``update_expert_bias`` after each step; 0 for none
    forces_balance: bool = False  # whether tokens go to experts in turn, for benchmarks
    spare_places: int = 0  # of each rank, for experts that are copied for every batch; 0 for no such balance
    model: Path | None = None  # a folder of transformers to start from, instead of random weights of ``architecture``
    eval_every: int = 25  # steps between losses of held-out text; there is one after the last step, too
    sample_tokens: int = 64  # that the model writes at the end
    metrics: tuple[str, ...] = ()  # where metrics of each step go, as for ``open_writer``
    export: Path | None = None  # where to write the model at the end, for ``from_pretrained``
    dropout: float = 0.0  # probability with which an attention probability is dropped
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
        self._check_ranges()
        if self.spare_places and ("torch" in self.dispatchers or self.forces_balance):
            raise ValueError("--balance goes with --dispatcher fusco alone, and without --forced-balance")
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

    def _check_ranges(self) -> None:
        for name in ("num_ranks", "ep_size", "tokens", "length", "num_steps", "learning_rate"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        for name in ("router_loss", "warmup_steps", "balance_rate"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")
        if self.model is None and self.architecture == "glm4_moe" and self.router_loss:
            raise ValueError(
                f"glm4_moe has no router loss, got router_loss={self.router_loss}: set balance_rate instead"
            )
        if self.model is None and self.architecture == "qwen3_moe" and self.balance_rate:
            raise ValueError(f"qwen3_moe has no bias to balance, got balance_rate={self.balance_rate}: take glm4_moe")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")

    @property
    def num_sequences(self) -> int:
        """Sequences of each rank in each step."""
        return self.tokens // self.length

    @property
    def bytes_per_step(self) -> int:
        """Bytes of text that one step of all ranks reads."""
        return self.num_ranks * self.num_sequences * (self.length + 1)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of a rank's shards: parameters, their gradients, and two moments of AdamW, all in float32."""
        return 4 * 4 * self.shape.num_parameters(self.shape.num_experts) // self.num_ranks
