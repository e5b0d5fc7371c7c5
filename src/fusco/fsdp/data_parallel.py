"""What ``DistributedDataParallel``, and with it other frameworks' training loops, says about a parallelized model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class _NoNames:
    """Names of parameters that ``DistributedDataParallel`` asks a model for, before all else: there are none to give.

    It would fail when it sends parameters, with an error about operands of an operation of ``DTensor``.
    """

    model: str

    def __iter__(self) -> Iterator[str]:
        raise TypeError(
            f"DistributedDataParallel cannot wrap this {self.model}, whose gradients fusco.fsdp.parallelize adds up "
            f"already. For transformers' Trainer, load the model within fusco.fsdp.registered_with_transformers. With "
            f"accelerate, call accelerator.prepare for all but the model. In Lightning, parallelize in "
            f"ModelParallelStrategy, and clip gradients with fusco.fsdp.clip_grad_norm_"
        )


def refuse_data_parallel(model: nn.Module, name: str) -> None:
    """Make ``DistributedDataParallel`` raise ``TypeError`` for a model, which has the name of its class before."""
    model._ddp_params_and_buffers_to_ignore = _NoNames(name)  # type: ignore[assignment]  # noqa: SLF001  DDP's only door
