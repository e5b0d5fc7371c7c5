"""Compare what modules of experts compute with what is about to replace it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from fusco.fsdp.experts import Experts, ScaledInputs
from fusco.fsdp.mesh import local_values

_Made = dict[tuple[int, torch.Size, torch.device, bool], torch.Tensor]

# Of rows: activations are linear for small inputs, and clamps (7 and 10 in models of 2026) act on large ones.
_SCALES = (0.1, 1.0, 10.0, 100.0)
# Of a row's largest value. Float32 products that PyTorch may compute with 8 to 11 bits differ by far more.
_RTOL, _COARSE_RTOL = 1e-3, 5e-2
_SHIFT = 16  # elements between the matrices of neighbouring experts; rows stay multiples of 16 bytes


def check_formulas(found: Sequence[Experts]) -> None:
    """Run each module of experts, and its replacement, on four random rows in float32.

    During the check, parameters are replaced by random ones of the same shapes, so that models on the meta device are
    compared too, and biases of zero hide nothing. Random numbers are the same on all ranks, and PyTorch's generators
    are left unchanged. The experts' random matrices overlap in memory, which takes little more than one of them.
    Modules that are equal in everything but their parameters' values are compared once.

    Raises ``ValueError`` for a module that computes something else, or cannot run, with the difference or error. A
    module whose buffers are on the meta device cannot run: it is not compared, and a warning says so.
    """
    made: _Made = {}
    kind_to_experts = {_kind(experts.scaling_block or experts.module): experts for experts in reversed(found)}
    for experts in reversed(kind_to_experts.values()):
        module = experts.scaling_block or experts.module
        # Without the experts implementation of transformers.
        forward = module.forward if "forward" in vars(module) else _class_forward(module)
        _check(replace(experts, adapters=[]), forward, made)


class FormulaChecks:
    """Checks of modules that transformers has distributed or runs, one at a time; equal modules are checked once."""

    def __init__(self) -> None:
        # Keys of living modules only: a key contains the ids of attributes, which are reused after a module is freed.
        self._module_to_kind: weakref.WeakKeyDictionary[nn.Module, Hashable] = weakref.WeakKeyDictionary()

    @torch.compiler.disable(reason="the check runs once and is not part of the model")  # type: ignore[untyped-decorator,no-untyped-call]
    def check(self, experts: Experts) -> None:
        """Raise as ``check_formulas`` does; parameters may be ``DTensor``, distributed on dimension 0.

        The forward pass compared is that of the module's class: one of the instance may be what called fusco.
        """
        kind = _kind(experts.module)
        if kind in self._module_to_kind.values():
            return
        local = replace(experts, num_experts=len(experts.local(experts.up_name)))
        with _disable_current_modes():  # modes of checkpointing would count the operations of the first pass only
            _check(local, _class_forward(experts.module), {})
        self._module_to_kind[experts.module] = kind


def _check(experts: Experts, forward: Callable[..., Any], made: _Made) -> None:
    on_meta = [name for name, buffer in experts.module.named_buffers() if buffer.is_meta]
    if on_meta:
        warnings.warn(
            f"{f'{experts.name}.{on_meta[0]}'.removeprefix('.')} is on the meta device, so fusco cannot check whether "
            f"{type(experts.module).__name__} computes what fusco replaces it by: make the model in "
            f"fusco.fsdp.parameters_on_meta(), which keeps buffers",
            stacklevel=5,
        )
        return
    with ExitStack() as trials:
        device = trials.enter_context(_on_trial(experts.module, made))
        for module in experts.scaling_block.modules() if experts.scaling_block else ():
            if module is not experts.module:
                trials.enter_context(_on_trial(module, made))
        _check_formula(experts, forward, device)


def _kind(module: nn.Module) -> Hashable:
    """Return a key that is equal for modules that differ in nothing but the values of their parameters."""
    internals = vars(nn.Module()).keys()
    attributes = {name: value for name, value in vars(module).items() if name not in internals}
    plain = (bool, int, float, str, type(None))
    return (
        type(module),
        tuple((name, value if isinstance(value, plain) else id(value)) for name, value in sorted(attributes.items())),
        tuple((name, value.shape) for name, value in module.named_parameters(recurse=False)),
        tuple((name, id(value)) for name, value in module.named_buffers(recurse=False)),
        tuple((name, _kind(child)) for name, child in module.named_children()),
    )


def _check_formula(experts: Experts, forward: Callable[..., Any], device: torch.device) -> None:
    class_name = type(experts.module).__name__
    who = f"{experts.name} ({class_name})" if experts.name else class_name
    x, top_k_index, top_k_weights = _make_inputs(experts, device)
    try:
        if experts.scaling_block is None:
            original = forward(x, top_k_index, top_k_weights)
            replaced = _replacement(experts, x, top_k_index, top_k_weights)
        else:
            original, replaced = forward(x)[0], _replacement_of_block(experts, x)
    except Exception as error:
        raise ValueError(
            f"{who} cannot be compared with what fusco would replace it by: on random rows in float32 on {device} it "
            f"raised {error!r}"
        ) from error
    if not isinstance(original, torch.Tensor) or original.shape != x.shape:
        shape = tuple(original.shape) if isinstance(original, torch.Tensor) else type(original).__name__
        raise ValueError(
            f"{who} returns {shape} for rows of shape {tuple(x.shape)}: fusco, which returns rows of the "
            f"same shape, cannot replace it"
        )
    difference = _difference(replaced, original)
    rtol = _rtol(device)
    if not difference <= rtol:
        raise ValueError(
            f"{who} computes something else than fusco, which would replace it by {experts.describe()}: on random rows "
            f"the outputs differ by {difference:.3g} times a row's largest value (allowed: {rtol:g})"
        )


def _rtol(device: torch.device) -> float:
    """Return the tolerance for the backend's precision; PyTorch (2.13) may raise if asked for that of all backends."""
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return _RTOL if backend.matmul.fp32_precision in ("none", "ieee") else _COARSE_RTOL


def _make_inputs(experts: Experts, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows of all scales, and a routing to different experts with weights other than 0 and 1."""
    generator = torch.Generator("cpu").manual_seed(1)
    up_shape, num_topk = getattr(experts.module, experts.up_name).shape, _num_topk(experts.module)
    scales = torch.tensor(_SCALES, dtype=torch.float32, device="cpu")
    x = _randn((len(scales), up_shape[1 if experts.is_transposed else 2]), generator) * scales[:, None]
    # A rank's part may be fewer experts than a token has; then tokens have an expert several times.
    num_experts = experts.num_experts + experts.num_zero_experts
    scores = _randn((len(scales), max(num_experts, num_topk)), generator)
    chosen, top_k_index = scores.topk(num_topk)
    return x.to(device), (top_k_index % num_experts).to(device), (0.2 + 0.6 * chosen.sigmoid()).to(device)


def _num_topk(module: nn.Module) -> int:
    """Return the model's number of experts per token, which some modules depend on; else 2."""
    holders = (module, getattr(module, "config", None))
    known = (getattr(holder, name, None) for holder in holders for name in ("top_k", "num_experts_per_tok"))
    return next((value for value in known if isinstance(value, int) and value > 0), 2)


def _class_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the ``forward`` that the module's class defines, without the experts implementation of transformers."""
    forward: Any = type(module).forward
    is_replaceable = getattr(forward, "__globals__", {}).get("__name__") == "transformers.integrations.moe"
    return partial(forward.__wrapped__ if is_replaceable else forward, module)


def _replacement(
    experts: Experts, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute what ``ExpertParallelLayer`` computes, on one rank."""
    expert_of_pair = top_k_index.flatten()
    order = expert_of_pair.argsort(stable=True)
    token_of_row = order // top_k_index.shape[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that float32 has no grouped GEMM on GPUs
        num_all = experts.num_experts + experts.num_zero_experts
        y = experts.run(x[token_of_row], expert_of_pair.bincount(minlength=num_all)[: experts.num_experts])
        is_zero = expert_of_pair[order, None] >= experts.num_experts
        y = torch.where(is_zero, x[token_of_row], y)
    weighted = y * top_k_weights.flatten()[order, None]
    return torch.zeros_like(x).index_add_(0, token_of_row, weighted)


def _replacement_of_block(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    """Compute what ``ScaledInputs`` computes, on one rank."""
    kept = vars(experts.module).get("forward")
    experts.module.forward = partial(_replacement, experts)
    try:
        out, _ = ScaledInputs(experts.scaling_block)(x)
    finally:
        del experts.module.forward
        if kept:
            experts.module.forward = kept
    return out


def _difference(replaced: torch.Tensor, original: torch.Tensor) -> float:
    """Return the largest difference of all finite rows, in units of the row's largest value.

    >>> _difference(torch.tensor([[1.0, 2], [0, 0]]), torch.tensor([[1.5, 2], [0, 0]]))
    0.25
    """
    finite = original.isfinite().all(1)
    if not finite.any():
        return float("nan")
    replaced, original = replaced[finite], original[finite]
    largest = original.abs().amax(1).clamp(min=torch.finfo(original.dtype).tiny)
    return float(((replaced - original).abs().amax(1) / largest).max())


@contextmanager
def _on_trial(module: nn.Module, made: _Made) -> Iterator[torch.device]:
    """Set random parameters of a module, in training mode and without gradients, for the duration of the block."""
    device = _device_of(module)
    # No public call swaps parameters without the side effects of registering them.
    parameters: dict[str, nn.Parameter | None] = module._parameters  # noqa: SLF001
    kept, training = dict(parameters), {each: each.training for each in module.modules()}
    cuda = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(cuda), torch.autocast(device.type, enabled=False):
        try:
            for seed, (name, parameter) in enumerate(kept.items()):
                if parameter is not None:
                    local = local_values(parameter)
                    is_matrix = local.ndim > 1 and not name.endswith("bias")
                    key = (seed, local.shape, device, is_matrix)
                    if key not in made:
                        made[key] = _make_values(local.shape, seed, device, is_matrix=is_matrix)
                    parameters[name] = nn.Parameter(made[key], requires_grad=False)
            for each in training:
                each.training = True  # dropout is part of the formula
            yield device
        finally:
            parameters.update(kept)
            for each, was_training in training.items():
                each.training = was_training


def _device_of(module: nn.Module) -> torch.device:
    tensors: list[torch.Tensor] = [*module.parameters(recurse=False), *module.buffers()]
    return next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))


def _make_values(shape: torch.Size, seed: int, device: torch.device, *, is_matrix: bool) -> torch.Tensor:
    """Return random float32 values, different for each expert: overlapping windows of the same numbers."""
    size = shape[1:].numel()
    generator = torch.Generator("cpu").manual_seed(seed)
    numbers = _randn((size + _SHIFT * shape[0],), generator)
    if is_matrix:
        numbers *= (shape[-2] * shape[-1]) ** -0.25  # keeps values near 1
    strides = numbers[:size].view(shape[1:]).stride()
    return numbers.to(device).as_strided(shape, (_SHIFT, *strides))


def _randn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
