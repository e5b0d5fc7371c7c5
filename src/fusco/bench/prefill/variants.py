"""Variants of the exchange of tokens: fusco, PyTorch's all-to-all, transformers' expert parallelism, DeepEP.

Each variant replaces the ``forward`` of a layer's experts. Dispatchers run this rank's experts as one grouped product
on expert-major rows; transformers' expert parallelism runs its own. All are compared before any is timed: layer by
layer on the same input, then the logits of all tokens.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from fusco.bench.harness.model_job import errors_beyond
from fusco.bench.prefill.copy_cost import with_measured_copies
from fusco.bench.prefill.iterations import CallClock
from fusco.bench.prefill.job import PrefillJob
from fusco.bench.shuffle.baseline import BaselineShuffle
from fusco.bench.shuffle.peers import BufferShuffle
from fusco.core.balance import Balance
from fusco.core.config import FSDP_SMS, Launch, Settings, StaticRows
from fusco.core.placement import ExpertPlacement
from fusco.core.requirements import installed, is_recent
from fusco.core.topology import Topology
from fusco.fsdp import Arrival, Dispatcher, Experts, FuscoDispatcher, TimedDispatcher, TorchDispatcher
from fusco.fsdp.layer import ExpertParallelLayer

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

VARIANTS = {
    "fusco": "rows sized exactly, all SMs",
    "fusco-32": f"rows sized exactly, {FSDP_SMS} SMs",
    "fusco-static": "static rows, all SMs: the host does not wait",
    "fusco-balanced": "rows sized exactly, busy experts copied for each batch where that costs less than it saves",
    "torch": "all_to_all_single (NCCL or gloo) between permutations: TorchDispatcher",
    "baseline": "the same as fast as these operations allow, the baseline of fusco bench shuffle",
    "transformers": "transformers' own all_to_all expert parallelism and grouped products",
    "deep_ep": "DeepEP's Buffer, rows permuted to expert-major and back",
}
EXACT = ("fusco", "fusco-32", "fusco-static")  # the same sums in the same order: equal bit for bit
_LEAST_TRANSFORMERS = "5.23"
_CHUNK = 256  # tokens whose logits are compared at once


def obstacle(variant: str, device: str, dtype: str) -> str:
    """Return why a variant cannot run here; empty if it can."""
    found = ""
    if variant == "fusco-32" and device == "cpu":
        found = "there are no SMs on the CPU"
    elif variant == "fusco-static" and (device, dtype) == ("cuda", "float32"):
        found = "PyTorch's grouped product on CUDA takes bfloat16 only, and a loop needs rows sized exactly"
    elif variant == "transformers":
        found = obstacle_of_transformers()
    elif variant == "deep_ep":
        found = obstacle_of_deep_ep(device)
    return found


def obstacle_of_deep_ep(device: str) -> str:
    """Return why ``deep_ep`` cannot run; empty if it can."""
    if importlib.util.find_spec("deep_ep") is None:
        return "deep_ep is not installed"
    try:
        version = deep_ep_version()
    except (ImportError, OSError) as error:
        return f"deep_ep cannot be imported: {error}"
    return f"deep_ep {version} needs GPUs" if device == "cpu" and "fusco" not in version else ""


def obstacle_of_transformers() -> str:
    """Return why transformers' ``all_to_all`` cannot run; empty if it can."""
    found = installed("transformers")
    if is_recent(found or "0", _LEAST_TRANSFORMERS):
        return ""
    what = f"transformers {found} has no all_to_all" if found else "transformers is not installed"
    return f"{what}; {_LEAST_TRANSFORMERS} is the first that has it"


def transformers_all_to_all() -> Any:
    """Return the class of transformers' ``all_to_all``, of experts and two meshes."""
    module: Any = importlib.import_module("transformers.distributed.expert_parallel")
    return module.EPImplementationInterface()["all_to_all"]


def deep_ep_version() -> str:
    """Return the version of the module, which fusco's own names fusco in."""
    return str(getattr(importlib.import_module("deep_ep"), "__version__", "unknown"))


@dataclass(frozen=True)
class Variant:
    """One way to move tokens."""

    name: str  # of ``VARIANTS``
    layers: Sequence[Layer]  # in place of each layer's experts: hidden states, ids and weights to weighted sums
    clock: CallClock  # of its dispatches and combines
    dispatcher: TimedDispatcher | None  # ``None`` for transformers

    def set_static_rows(self, num_rows: int) -> None:
        """Set the rows of static outputs, where the variant has them."""
        if self.name == "fusco-static" and self.dispatcher:
            cast("FuscoDispatcher", self.dispatcher.inner).static = StaticRows(num_rows)

    def synchronize(self) -> None:
        """Wait for everything that was moved; raises if something did not arrive."""
        if self.dispatcher:
            self.dispatcher.synchronize()


def make_variants(
    job: PrefillJob, group: dist.ProcessGroup, experts: Sequence[Experts], stack: ExitStack
) -> list[Variant]:
    """Return the job's variants; a collective. ``stack`` closes them."""
    return [_make(name, job, group, experts, stack) for name in job.variants]


def reference_layers(group: dist.ProcessGroup, experts: Sequence[Experts]) -> list[Layer]:
    """Return the layers that others are compared with: PyTorch's all-to-all, sums in float32, rounded once."""
    return [ExpertParallelLayer(each, ReferenceDispatcher(group)) for each in experts]


def _make(
    name: str, job: PrefillJob, group: dist.ProcessGroup, experts: Sequence[Experts], stack: ExitStack
) -> Variant:
    clock = CallClock(job.device)
    if name == "transformers":
        return Variant(name, _transformers_layers(job, experts, clock), clock, None)
    inner, balance = _dispatcher(name, job, group, stack), None
    if name == "fusco-balanced":
        assert isinstance(inner, FuscoDispatcher)
        num_topk, spare = job.shape.num_topk, Balance(job.spare_places)
        balance = with_measured_copies(spare, inner, experts[0], num_topk, job.tokens * num_topk)
    dispatcher = TimedDispatcher(inner, clock)
    return Variant(name, [ExpertParallelLayer(each, dispatcher, balance) for each in experts], clock, dispatcher)


def _dispatcher(name: str, job: PrefillJob, group: dist.ProcessGroup, stack: ExitStack) -> Dispatcher:
    if name == "torch":
        return TorchDispatcher(group)
    num_experts = job.shape.num_experts
    if name == "baseline":
        placement = ExpertPlacement.contiguous(num_experts, job.num_ranks)
        topology = Topology.of_equal_nodes(job.num_ranks, job.ranks_per_node)
        return ShuffleDispatcher(group, BaselineShuffle(group, placement, topology, job.device))
    if name == "deep_ep":
        return ShuffleDispatcher(group, stack.enter_context(BufferShuffle(group, num_experts, None)))
    launch = Launch(num_sms=FSDP_SMS if name == "fusco-32" else None)
    settings = Settings(timeout_s=job.timeout_s)
    made = FuscoDispatcher(group, job.tokens, ranks_per_node=job.ranks_per_node, settings=settings, launch=launch)
    return stack.enter_context(made)


def _transformers_layers(job: PrefillJob, experts: Sequence[Experts], clock: CallClock) -> list[Layer]:
    mesh = dist.device_mesh.init_device_mesh(job.device, (job.num_ranks, 1), mesh_dim_names=("ep", "tp"))
    all_to_all = transformers_all_to_all()
    return [TimedTransformersLayer(all_to_all(each.module, mesh["ep"], mesh["tp"]), clock) for each in experts]


class TimedTransformersLayer:
    """Runs an ``EPImplementation``; what precedes its experts is "dispatch", what follows is "combine".

    Rows reach its experts by source rank, so a permutation of theirs is not in these sections.
    """

    def __init__(self, implementation: Any, clock: CallClock) -> None:
        self._implementation, self._clock = implementation, clock
        self._experts_forward, implementation.experts_forward = implementation.experts_forward, self._run_experts

    def __call__(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts."""
        self._clock.mark("dispatch")
        out: torch.Tensor = self._implementation(x, topk_idx, topk_weights)
        self._clock.mark("combine")
        return out

    def _run_experts(self, *arguments: torch.Tensor) -> torch.Tensor:
        self._clock.mark("dispatch")
        out: torch.Tensor = self._experts_forward(*arguments)
        self._clock.mark("combine")
        return out


class ShuffleDispatcher(TorchDispatcher):
    """Moves rows by an object that ``fusco bench shuffle`` compares fusco with, such as ``BaselineShuffle``."""

    def __init__(self, group: dist.ProcessGroup, shuffle: Any) -> None:
        super().__init__(group)
        self._shuffle = shuffle

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
    ) -> Arrival:
        """Send tokens to their experts."""
        assert num_experts % self.group.size() == 0
        rows, on_host, handle = self._shuffle.dispatch(x, topk_idx, topk_weights.float())
        # From pinned memory, as the host would wait for the stream otherwise.
        counts = torch.tensor(on_host, dtype=torch.int64, device="cpu", pin_memory=x.is_cuda)
        return Arrival(rows, counts.to(x.device, non_blocking=True), handle)

    def combine(self, y: torch.Tensor, arrival: Arrival) -> torch.Tensor:
        """Return the experts' results to their tokens."""
        return self._shuffle.combine(y, arrival.ticket)


class ReferenceDispatcher(TorchDispatcher):
    """PyTorch's all-to-all with weights in float32, and therefore sums in float32 that are rounded once."""

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
    ) -> Arrival:
        """Send tokens to their experts."""
        return super().dispatch(x, topk_idx, topk_weights.float(), num_experts)


@dataclass
class Deviation:
    """Deviation of a variant from the reference, over all tokens of a rank."""

    layer: float = 0.0  # the largest error of a token's output in any layer, relative to the norm of the reference
    logits: float = 0.0  # the largest error of a token's logits
    typical_logits: float = 0.0  # the median of these errors
    num_same_tokens: int = 0  # tokens whose most probable next token is the same
    num_inexact: int = 0  # layers in which the outputs of fusco's variants differ in a bit, and passes repeated that do

    def failures(self, dtype: str) -> list[str]:
        """Describe what is beyond its limit; empty if nothing is."""
        found = errors_beyond(dtype, self.layer, self.logits, "the logits of a token are")
        if self.num_inexact:
            found.append(f"{self.num_inexact} outputs differ from those of fusco in their bits")
        return found


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the error of each row (num_rows, width), relative to the expected row's norm; infinite if not a number.

    >>> relative_error(torch.tensor([[3.0, 4.5]]), torch.tensor([[3.0, 4.0]])).tolist()
    [0.10000000149011612]
    """
    wanted = expected.float()
    norm = torch.linalg.vector_norm
    error: torch.Tensor = norm(out.float() - wanted, dim=1) / norm(wanted, dim=1).clamp(min=1e-20)
    return error.nan_to_num(nan=torch.inf)


def compare_layer(
    layers: Mapping[str, Layer],
    reference: Layer,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    deviations: Mapping[str, Deviation],
) -> torch.Tensor:
    """Run one layer by all variants on the same input, add to their deviations, and return the reference's output."""
    expected, first = reference(*inputs), None
    for name, layer in layers.items():
        out, deviation = layer(*inputs), deviations[name]
        if len(out):
            deviation.layer = max(deviation.layer, float(relative_error(out, expected).max()))
        if name in EXACT:
            first = out.clone() if first is None else first
            deviation.num_inexact += not torch.equal(out, first)
    return expected


def compare_logits(
    hidden: torch.Tensor, expected: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], deviation: Deviation
) -> None:
    """Compare the logits that ``head`` makes of hidden states (num_tokens, hidden), if there are any."""
    if not len(hidden):
        return
    errors, num_same = [], 0
    for ours, theirs in zip(torch.split(hidden, _CHUNK), torch.split(expected, _CHUNK), strict=True):
        logits, wanted = head(ours), head(theirs)
        errors.append(relative_error(logits, wanted))
        num_same += int((logits.argmax(-1) == wanted.argmax(-1)).sum())
    of_tokens = torch.cat(errors)
    deviation.logits = max(deviation.logits, float(of_tokens.max()))
    deviation.typical_logits, deviation.num_same_tokens = float(of_tokens.median()), num_same
