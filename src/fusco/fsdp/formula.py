"""What modules of experts compute, compared with what is about to replace them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fusco.fsdp.experts import Experts

# Of rows: activations are linear for small inputs, and clamps (7 and 10 in models of 2026) show with large ones.
_SCALES = (0.1, 1.0, 10.0, 100.0)
# Of a row's largest value. Products of float32 that PyTorch may compute with 8 to 11 bits are far off by themselves.
_RTOL, _COARSE_RTOL = 1e-3, 5e-2
_SHIFT = 16  # elements between the matrices of neighbouring experts; rows stay multiples of 16 bytes


def check_formulas(found: Sequence[Experts]) -> None:
    """Run each module of experts, and what would replace it, on four random rows in float32.

    Parameters are replaced by random ones of the same shapes meanwhile, so that models on the meta device are compared
    too, and biases of zero hide nothing. Random numbers are the same on all ranks, and PyTorch's generators go on as if
    nothing had been drawn. The experts' random matrices overlap in memory, which takes little more than one of them.
    Modules that are alike in everything but their parameters' values are compared once.

    Raises:
        ValueError: for a module that computes something else, or cannot run, with what came out. One whose buffers are
            on the meta device cannot run and is not compared, of which a warning says so.

    """
    made: dict[tuple[int, torch.Size, torch.device], torch.Tensor] = {}
    kind_to_experts = {_kind(experts.module): experts for experts in reversed(found)}
    for experts in reversed(kind_to_experts.values()):
        on_meta = [name for name, buffer in experts.module.named_buffers() if buffer.is_meta]
        if on_meta:
            warnings.warn(
                f"{experts.name}.{on_meta[0]} is on the meta device, so that it is not checked whether "
                f"{type(experts.module).__name__} computes what fusco replaces it by: make the model in "
                f"fusco.fsdp.parameters_on_meta(), which keeps buffers",
                stacklevel=4,
            )
        else:
            with _on_trial(experts.module, made) as device:
                _check_formula(experts, device)


def _kind(module: nn.Module) -> Hashable:
    """Equal for modules that compute the same of equal parameters: but for values, nothing of theirs is different."""
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


def _check_formula(experts: Experts, device: torch.device) -> None:
    module, who = experts.module, f"{experts.name} ({type(experts.module).__name__})"
    x, top_k_index, top_k_weights = _make_inputs(experts, device)
    try:
        theirs = _plain_forward(module)(x, top_k_index, top_k_weights)
        ours = _replacement(experts, x, top_k_index, top_k_weights)
    except Exception as error:
        raise ValueError(
            f"{who} cannot be compared with what fusco would replace it by: on random rows in float32 on {device} it "
            f"raised {error!r}"
        ) from error
    if not isinstance(theirs, torch.Tensor) or theirs.shape != x.shape:
        shape = tuple(theirs.shape) if isinstance(theirs, torch.Tensor) else type(theirs).__name__
        raise ValueError(
            f"{who} gives {shape} for rows of shape {tuple(x.shape)}: fusco cannot replace it, as it gives rows of the "
            f"same shape"
        )
    difference = _difference(ours, theirs)
    rtol = _rtol(device)
    if not difference <= rtol:
        raise ValueError(
            f"{who} computes something else than fusco, which would replace it by {experts.describe()}: on random rows "
            f"the outputs differ by {difference:.3g} times a row's largest value (allowed: {rtol:g})"
        )


def _rtol(device: torch.device) -> float:
    """By the precision of products; asked of the backend, since PyTorch (2.13) may refuse to name one for all."""
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return _RTOL if backend.matmul.fp32_precision in ("none", "ieee") else _COARSE_RTOL


def _make_inputs(experts: Experts, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of all scales, and a routing to different experts with weights that are neither 0 nor 1."""
    generator = torch.Generator("cpu").manual_seed(1)
    up_shape = getattr(experts.module, experts.up_name).shape
    scales = torch.tensor(_SCALES, dtype=torch.float32, device="cpu")
    x = _randn((len(scales), up_shape[1 if experts.is_transposed else 2]), generator) * scales[:, None]
    scores = _randn((len(scales), experts.num_experts), generator)
    chosen, top_k_index = scores.topk(min(_num_topk(experts.module), experts.num_experts))
    return x.to(device), top_k_index.to(device), (0.2 + 0.6 * chosen.sigmoid()).to(device)


def _num_topk(module: nn.Module) -> int:
    """As many as the model will ask for, where a module counts on that."""
    holders = (module, getattr(module, "config", None))
    known = (getattr(holder, name, None) for holder in holders for name in ("top_k", "num_experts_per_tok"))
    return next((value for value in known if isinstance(value, int) and value > 0), 2)


def _plain_forward(module: nn.Module) -> Callable[..., Any]:
    """The module's ``forward`` as its class spells it, whichever implementation of it transformers has been told."""
    forward: Any = type(module).forward
    is_replaceable = getattr(forward, "__globals__", {}).get("__name__") == "transformers.integrations.moe"
    if is_replaceable and "forward" not in vars(module):
        return partial(forward.__wrapped__, module)
    return module.forward


def _replacement(
    experts: Experts, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What ``ExpertParallelLayer`` computes, on one rank."""
    expert_of_pair = top_k_index.flatten()
    order = expert_of_pair.argsort(stable=True)
    token_of_row = order // top_k_index.shape[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that float32 has no grouped GEMM on GPUs
        y = experts.run(x[token_of_row], expert_of_pair.bincount(minlength=experts.num_experts))
    weighted = y * top_k_weights.flatten()[order, None]
    return torch.zeros_like(x).index_add_(0, token_of_row, weighted)


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest of all rows, in units of the row's largest value; rows that are not finite are left out.

    >>> _difference(torch.tensor([[1.0, 2], [0, 0]]), torch.tensor([[1.5, 2], [0, 0]]))
    0.25

    """
    finite = theirs.isfinite().all(1)
    if not finite.any():
        return float("nan")
    ours, theirs = ours[finite], theirs[finite]
    largest = theirs.abs().amax(1).clamp(min=torch.finfo(theirs.dtype).tiny)
    return float(((ours - theirs).abs().amax(1) / largest).max())


@contextmanager
def _on_trial(
    module: nn.Module, made: dict[tuple[int, torch.Size, torch.device], torch.Tensor]
) -> Iterator[torch.device]:
    """Give a module random parameters and have it train, without gradients, for the time of the block."""
    device = _device_of(module)
    # No public way swaps parameters and leaves alone what else registering them does.
    parameters: dict[str, nn.Parameter | None] = module._parameters  # noqa: SLF001
    kept, training = dict(parameters), {each: each.training for each in module.modules()}
    cuda = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(cuda), torch.autocast(device.type, enabled=False):
        try:
            for seed, (name, parameter) in enumerate(kept.items()):
                if parameter is not None:
                    key = (seed, parameter.shape, device)
                    if key not in made:
                        made[key] = _make_values(parameter.shape, seed, device)
                    parameters[name] = nn.Parameter(made[key], requires_grad=False)
            for each in training:
                each.training = True  # dropout is part of what it computes
            yield device
        finally:
            parameters.update(kept)
            for each, was_training in training.items():
                each.training = was_training


def _device_of(module: nn.Module) -> torch.device:
    tensors = [*module.parameters(recurse=False), *module.buffers()]
    return next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))


def _make_values(shape: torch.Size, seed: int, device: torch.device) -> torch.Tensor:
    """Random float32 values, different for each expert: a window on the same numbers that begins elsewhere."""
    size = shape[1:].numel()
    generator = torch.Generator("cpu").manual_seed(seed)
    numbers = _randn((size + _SHIFT * shape[0],), generator)
    if len(shape) == 3:
        numbers *= (shape[1] * shape[2]) ** -0.25  # so that values neither vanish nor grow much
    strides = (shape[2], 1) if len(shape) == 3 else (1,)
    return numbers.to(device).as_strided(shape, (_SHIFT, *strides))


def _randn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
