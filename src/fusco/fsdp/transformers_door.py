"""The door that transformers (5.23 and newer) has for others' expert parallelism: ``EPImplementationInterface``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fusco.fsdp.experts import find_experts
from fusco.fsdp.fusco_dispatcher import FuscoDispatcher
from fusco.fsdp.layer import ExpertParallelLayer
from fusco.settings import Settings


@contextmanager
def registered_with_transformers(
    max_tokens_per_rank: int, *, name: str = "fusco", settings: Settings | None = None
) -> Iterator[None]:
    """Let transformers distribute a model, and move its tokens with fusco.

    In the block, ``from_pretrained(..., distributed_config=DistributedConfig(..., ep_implementation="fusco"))`` makes
    models whose experts use fusco. They run in the block only; its end closes the communicators, a collective.

    Args:
        max_tokens_per_rank: as for ``FuscoDispatcher``.
        name: to be given as ``ep_implementation``.
        settings: of the communicators.

    Raises:
        ImportError: if transformers is older than 5.23, or not there.
        ValueError: from ``from_pretrained``, with tensor parallelism, where several ranks have the same batch.

    """
    module = importlib.import_module("transformers.distributed.expert_parallel")
    registry = getattr(module, "EPImplementationInterface", None)
    if registry is None:
        raise ImportError("transformers has no EPImplementationInterface: 5.23 is the first version with it")
    dispatchers: dict[DeviceMesh, FuscoDispatcher] = {}

    def make(experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> ExpertParallelLayer:
        if tp_mesh.size() > 1:
            raise ValueError(f"fusco's experts need a batch of its own on every rank, got tp_size={tp_mesh.size()}")
        if ep_mesh not in dispatchers:
            dispatchers[ep_mesh] = FuscoDispatcher(ep_mesh.get_group(), max_tokens_per_rank, settings=settings)
        (found,) = find_experts(experts)
        # transformers has cut the experts already, and remembers how many are left.
        num_experts = int(torch.as_tensor(experts.num_experts)) * ep_mesh.size()
        return ExpertParallelLayer(replace(found, num_experts=num_experts), dispatchers[ep_mesh])

    registry.register(name, make)
    try:
        yield
    except BaseException as error:
        for dispatcher in dispatchers.values():
            dispatcher.__exit__(type(error), error, error.__traceback__)
        raise
    else:
        for dispatcher in dispatchers.values():
            dispatcher.close()
    finally:
        registry._global_mapping.pop(name, None)  # noqa: SLF001  it has no way to take a name out for good
