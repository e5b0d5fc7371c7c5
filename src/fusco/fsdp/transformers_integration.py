"""Register fusco with transformers, as an expert-parallel implementation or as an experts implementation.

The registries are ``EPImplementationInterface`` (5.23 and newer) and ``ALL_EXPERTS_FUNCTIONS`` (5.9 and newer).
"""

from __future__ import annotations

import importlib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fusco.core.config import Launch, Settings, StaticRows
from fusco.fsdp.dispatcher import Dispatcher
from fusco.fsdp.experts import Experts, find_experts
from fusco.fsdp.formula import FormulaChecks
from fusco.fsdp.fusco_dispatcher import FuscoDispatcher
from fusco.fsdp.layer import ExpertParallelLayer, SlicedLayer, remember_layer

MakeDispatcher = Callable[[dist.ProcessGroup], Dispatcher]
_NAME = "load_balancing_loss_func"  # in modules of transformers' models; 34 kinds have the same (5.24)
_OF_OTHERS = "transformers.models.mixtral.modeling_mixtral"  # whose loss TRL (1.16) takes for all models
_RTOL = 1e-5


@contextmanager
def registered_with_transformers(
    max_tokens_per_rank: int,
    *,
    name: str = "fusco",
    settings: Settings | None = None,
    launch: Launch | None = None,
    static: StaticRows | None = None,
    dispatcher: MakeDispatcher | None = None,
) -> Iterator[None]:
    """Move the tokens of models that transformers distributes with fusco.

    In the block, ``from_pretrained(..., distributed_config=DistributedConfig(..., ep_implementation="fusco"))`` makes
    models whose experts use fusco. They run in the block only; its end closes the communicators, a collective. Ranks of
    a tensor-parallel group, which have the same batch, dispatch a slice of it each. Losses that balance routers
    (``output_router_logits=True``) are those of the tokens of all ranks.

    Args:
        max_tokens_per_rank: as for ``FuscoDispatcher``.
        name: the value of ``ep_implementation``.
        settings: of the communicators.
        launch: as for ``FuscoDispatcher``; ``Launch()`` uses all SMs, for models without FSDP.
        static: as for ``FuscoDispatcher``: in exchange for memory, the host waits for no dispatch.
        dispatcher: makes another dispatcher of a group, such as ``TorchDispatcher``; settings, launch and static are
            unused then.

    Raises:
        ImportError: if transformers is missing or older than 5.23.
        ValueError: from ``from_pretrained``, for experts that do not compute what ``Experts.run`` computes.
    """
    module = importlib.import_module("transformers.distributed.expert_parallel")
    registry = getattr(module, "EPImplementationInterface", None)
    if registry is None:
        raise ImportError("transformers has no EPImplementationInterface: 5.23 is the first version with it")
    dispatchers: dict[DeviceMesh, Dispatcher] = {}
    formulas = FormulaChecks()
    make_dispatcher = dispatcher or partial(
        FuscoDispatcher, max_tokens_per_rank=max_tokens_per_rank, settings=settings, launch=launch, static=static
    )
    opened, losses = ExitStack(), RouterLosses()

    def make(experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> ExpertParallelLayer | SlicedLayer:
        if ep_mesh not in dispatchers:
            dispatchers[ep_mesh] = _opened(opened, make_dispatcher(ep_mesh.get_group()))
        (found,) = find_experts(experts)
        formulas.check(found)
        losses.watch(experts)
        # transformers has distributed the experts already; num_experts is that of this rank.
        num_experts = int(torch.as_tensor(experts.num_experts, device="cpu")) * ep_mesh.size()
        layer = ExpertParallelLayer(replace(found, num_experts=num_experts), dispatchers[ep_mesh])
        remember_layer(experts, layer)
        return SlicedLayer(layer, tp_mesh) if tp_mesh.size() > 1 else layer

    with opened, losses.restored(), _registered(registry, name, make):
        yield


@contextmanager
def registered_as_experts_implementation(
    group: dist.ProcessGroup,
    max_tokens_per_rank: int,
    *,
    name: str = "fusco",
    settings: Settings | None = None,
    launch: Launch | None = None,
    static: StaticRows | None = None,
    dispatcher: MakeDispatcher | None = None,
) -> Iterator[None]:
    """Run experts that are already distributed, and move their tokens with fusco.

    In the block, ``model.set_experts_implementation("fusco")`` and ``from_pretrained(...,
    experts_implementation="fusco")`` accept the name, and such models can run; its end closes the communicators, a
    collective. Every rank of the group must have its block of consecutive experts: as ``DTensor`` parameters
    distributed on dimension 0, or as plain ones with that many experts. The caller reduces gradients.

    ``group`` are the ranks among which experts are distributed, such as ``EPMesh.ep_group``, and ``name`` is that of
    the implementation. All other arguments are as for ``registered_with_transformers``.

    Raises:
        ImportError: if transformers is missing or has no such registry.
        ValueError: in the first forward pass of a model, for experts that ``find_experts`` rejects or that do not
            compute what ``Experts.run`` computes, and if the experts of all ranks are not as many as the module's
            ``num_experts``.
    """
    registry: Any = importlib.import_module("transformers.integrations.moe")
    if not hasattr(registry, "ALL_EXPERTS_FUNCTIONS"):
        raise ImportError("transformers has no ALL_EXPERTS_FUNCTIONS: 5.9 is the first version that takes other names")
    # Weak references, so that models can be freed before the block ends.
    known: weakref.WeakKeyDictionary[nn.Module, Experts] = weakref.WeakKeyDictionary()
    formulas = FormulaChecks()
    make_dispatcher = dispatcher or partial(
        FuscoDispatcher, max_tokens_per_rank=max_tokens_per_rank, settings=settings, launch=launch, static=static
    )
    with ExitStack() as opened:
        made = _opened(opened, make_dispatcher(group))

        def run(
            module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            if module not in known:
                proxy: Any = weakref.proxy(module)
                known[module] = replace(_distributed(module, group.size(), formulas), module=proxy)
            layer = ExpertParallelLayer(replace(known[module], module=module), made)
            return layer(hidden_states, top_k_index, top_k_weights)

        with _registered(registry.ALL_EXPERTS_FUNCTIONS, name, run):
            yield


@contextmanager
def _registered(registry: Any, name: str, implementation: Callable[..., Any]) -> Iterator[None]:
    registry.register(name, implementation)
    try:
        yield
    finally:
        registry._global_mapping.pop(name, None)  # noqa: SLF001  no public call removes a name


def _opened(opened: ExitStack, dispatcher: Dispatcher) -> Dispatcher:
    """Return a dispatcher, which is closed with ``opened`` if it can be."""
    return opened.enter_context(dispatcher) if isinstance(dispatcher, AbstractContextManager) else dispatcher


def _distributed(module: nn.Module, num_ranks: int, formulas: FormulaChecks) -> Experts:
    """Return the checked experts of a module that has this rank's part of them."""
    (found,) = find_experts(module)
    num_local, num_experts = len(found.local(found.up_name)), int(torch.as_tensor(module.num_experts, device="cpu"))
    if num_local * num_ranks != num_experts:
        raise ValueError(
            f"{type(module).__name__} has {num_experts} experts and this rank has {num_local} of them, but "
            f"{num_ranks} ranks share them: distribute its parameters on dimension 0 first"
        )
    formulas.check(found)
    return replace(found, num_experts=num_experts)


def balance_loss(
    gate_logits: Sequence[torch.Tensor],
    num_experts: int,
    top_k: int = 2,
    attention_mask: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return E * sum of f_e * p_e over experts, of the tokens of all ranks; a collective of the group.

    f_e is the share of tokens that are sent to an expert, p_e its mean probability (Switch Transformers, equations 4 to
    6). Both are means over the tokens of all layers, and of all ranks of the group; on one rank this is
    ``load_balancing_loss_func`` of transformers. Gradients are those whose *mean* over ranks is the gradient of this
    loss, as transformers' data parallelism needs.

    Args:
        gate_logits: of each layer, (num_tokens, num_experts).
        num_experts: E.
        top_k: experts of a token.
        attention_mask: (num_sequences, length), 0 for tokens that do not count; ``None`` counts all.
        group: ``None`` means this rank alone.

    Returns:
        A scalar in float32.
    """
    device = gate_logits[0].device
    sums = torch.zeros(2, num_experts, dtype=torch.float32, device=device)  # of choices, and of probabilities
    num_tokens = torch.zeros((), dtype=torch.float32, device=device)
    for logits in gate_logits:
        probabilities = logits.to(device).softmax(dim=-1)
        chosen = probabilities.topk(top_k, dim=-1).indices
        counts = torch.zeros_like(probabilities, dtype=torch.float32).scatter_(1, chosen, 1.0)
        weights = torch.ones(len(logits), dtype=torch.float32, device=device)
        if attention_mask is not None:
            weights = attention_mask.reshape(-1).to(weights)
        sums = sums + torch.stack([weights @ counts, weights @ probabilities.float()])
        num_tokens = num_tokens + weights.sum()
    (choices, probability) = sums.unbind()
    if group is not None and group.size() > 1:
        everywhere = torch.cat([sums.detach().flatten(), num_tokens[None]])
        dist.all_reduce(everywhere, group=group)
        num_tokens, choices, whole = everywhere[-1], everywhere[:num_experts], everywhere[num_experts:-1]
        probability = whole + group.size() * (probability - probability.detach())
    return num_experts * (choices.detach() / num_tokens * (probability / num_tokens)).sum()


class RouterLosses:
    """Replaces the router losses of distributed models, for the duration of a block.

    Other models of the same classes in the process keep theirs: a loss is of all ranks' tokens only if distributed
    experts have run since the loss before it.
    """

    def __init__(self) -> None:
        self._patched: dict[str, Any] = {}
        self._has_run = False

    def watch(self, experts: nn.Module) -> None:
        """Replace the loss in the module that defines the class of these experts, and notice when they run."""
        if not hasattr(sys.modules.get(type(experts).__module__), _NAME):
            return
        experts.register_forward_pre_hook(self._notice)
        for name in {type(experts).__module__, _OF_OTHERS} - self._patched.keys():
            module = importlib.import_module(name)
            original = getattr(module, _NAME)
            if _is_known(original):
                self._patched[name] = mock.patch.object(module, _NAME, self._replacement(original))
                self._patched[name].start()
            else:
                warnings.warn(
                    f"{name}.{_NAME} computes another loss than fusco knows: it stays that of each rank's tokens",
                    stacklevel=2,
                )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the losses of transformers at the end of the block."""
        try:
            yield
        finally:
            for patch in self._patched.values():
                patch.stop()
            self._patched.clear()

    def _notice(self, *_: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # noqa: SLF001  not while a backward pass recomputes
            self._has_run = True

    def _replacement(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def loss(*args: Any, **kwargs: Any) -> Any:
            if not self._has_run:  # or without logits, for which the function of transformers returns 0
                return original(*args, **kwargs)
            self._has_run = False
            return balance_loss(*args, **kwargs, group=dist.group.WORLD)

        return loss


def _is_known(original: Callable[..., Any]) -> bool:
    """Return whether transformers' function computes what ``balance_loss`` computes on one rank."""
    generator = torch.Generator("cpu").manual_seed(1)
    logits = tuple(torch.randn((6, 4), generator=generator, dtype=torch.float32, device="cpu") for _ in range(2))
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], device="cpu")
    try:
        return all(
            torch.allclose(original(logits, 4, 2, each), balance_loss(logits, 4, 2, each), rtol=_RTOL)
            for each in (None, mask)
        )
    except Exception:  # noqa: BLE001  another signature, say
        return False
