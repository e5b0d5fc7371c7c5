"""What moves tokens between experts: fusco, PyTorch's all-to-all, transformers' expert parallelism, DeepEP.

Each variant replaces the ``forward`` of a layer's experts. Dispatchers run this rank's experts as one grouped product
on expert-major rows; transformers' expert parallelism runs its own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fusco.bench.peers import BufferShuffle
from fusco.bench.prefill.job import PrefillJob
from fusco.bench.stopwatch import Stopwatch
from fusco.core.config import Launch, Settings, StaticRows
from fusco.core.requirements import installed, is_recent
from fusco.cuda.tuning import FSDP_SMS
from fusco.fsdp import Arrival, Dispatcher, Experts, FuscoDispatcher, TorchDispatcher
from fusco.fsdp.layer import ExpertParallelLayer
from fusco.planner.routing import Routing

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

VARIANTS = {
    "fusco": "rows sized exactly, all multiprocessors",
    "fusco-32": f"rows sized exactly, {FSDP_SMS} multiprocessors",
    "fusco-static": "static rows, all multiprocessors: the host does not wait",
    "torch": "all_to_all_single (NCCL or gloo) between permutations: TorchDispatcher",
    "transformers": "transformers' own all_to_all expert parallelism and grouped products",
    "deep_ep": "DeepEP's Buffer, rows permuted to expert-major and back",
}
EXACT = ("fusco", "fusco-32", "fusco-static")  # the same sums in the same order: equal bit for bit
_LEAST_TRANSFORMERS = "5.23"


def obstacle(variant: str, device: str, dtype: str) -> str:
    """Return why a variant cannot run here; empty if it can."""
    if variant == "fusco-32" and device == "cpu":
        return "there are no multiprocessors on the CPU"
    if variant == "fusco-static" and (device, dtype) == ("cuda", "float32"):
        return "PyTorch's grouped product on CUDA takes bfloat16 only, and a loop needs rows sized exactly"
    if variant == "transformers" and not is_recent(installed("transformers"), _LEAST_TRANSFORMERS):
        return f"transformers {installed('transformers')} has no all_to_all; {_LEAST_TRANSFORMERS} is the first"
    if variant == "deep_ep":
        if importlib.util.find_spec("deep_ep") is None:
            return "deep_ep is not installed"
        try:
            version = deep_ep_version()
        except (ImportError, OSError) as error:
            return f"deep_ep cannot be imported: {error}"
        if device == "cpu" and "fusco" not in version:
            return f"deep_ep {version} needs GPUs"
    return ""


def deep_ep_version() -> str:
    """Return the version of the module, which fusco's own names fusco in; empty if there is none."""
    found = importlib.util.find_spec("deep_ep")
    return str(getattr(importlib.import_module("deep_ep"), "__version__", "unknown")) if found else ""


@dataclass
class SectionClock:
    """Marks the beginning and end of dispatch and combine in every layer, while it is on.

    On CUDA these are events on the current stream, so a section includes waiting for other ranks and for the host.
    """

    device: str
    is_on: bool = False
    _marks: dict[str, list[Any]] = field(default_factory=dict)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Mark a section around the block."""
        self.mark(name)
        yield
        self.mark(name)

    def mark(self, name: str) -> None:
        """Begin a section, or end the one that has begun."""
        if self.is_on:
            self._marks.setdefault(name, []).append(Stopwatch(self.device).mark())

    def take_ms(self, name: str) -> float:
        """Return the sum of a section's times since the last call; the device must have reached all marks."""
        marks, watch = self._marks.pop(name, []), Stopwatch(self.device)
        return sum(watch.elapsed_ms(start, end) for start, end in zip(marks[::2], marks[1::2], strict=True))


@dataclass(frozen=True)
class Variant:
    """One way to move tokens.

    Attributes:
        name: of ``VARIANTS``.
        layers: in place of each layer's experts: hidden states, ids and weights to weighted sums.
        clock: of its dispatches and combines.
        dispatcher: ``None`` for transformers.
    """

    name: str
    layers: Sequence[Layer]
    clock: SectionClock
    dispatcher: Dispatcher | None

    def set_static_rows(self, num_rows: int) -> None:
        """Set the rows of static outputs, where the variant has them."""
        if self.dispatcher and isinstance(self.dispatcher, TimedDispatcher):
            inner = self.dispatcher.inner
            if isinstance(inner, StaticDispatcher):
                inner.num_rows = num_rows

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
    return [ExpertParallelLayer(each, _ReferenceDispatcher(group)) for each in experts]


def _make(
    name: str, job: PrefillJob, group: dist.ProcessGroup, experts: Sequence[Experts], stack: ExitStack
) -> Variant:
    clock = SectionClock(job.device)
    if name == "transformers":
        return Variant(name, _transformers_layers(job, experts, clock), clock, None)
    dispatcher = TimedDispatcher(_dispatcher(name, job, group, stack), clock)
    return Variant(name, [ExpertParallelLayer(each, dispatcher) for each in experts], clock, dispatcher)


def _dispatcher(name: str, job: PrefillJob, group: dist.ProcessGroup, stack: ExitStack) -> Dispatcher:
    if name == "torch":
        return TorchDispatcher(group)
    if name == "deep_ep":
        return DeepEPDispatcher(group, job.shape.num_experts)
    kind = StaticDispatcher if name == "fusco-static" else FuscoDispatcher
    launch = Launch(num_sms=FSDP_SMS if name == "fusco-32" else None)
    settings = Settings(timeout_s=job.timeout_s)
    return stack.enter_context(
        kind(group, job.tokens, ranks_per_node=job.ranks_per_node, settings=settings, launch=launch)
    )


def _transformers_layers(job: PrefillJob, experts: Sequence[Experts], clock: SectionClock) -> list[Layer]:
    module: Any = importlib.import_module("transformers.distributed.expert_parallel")
    mesh = dist.device_mesh.init_device_mesh(job.device, (job.num_ranks, 1), mesh_dim_names=("ep", "tp"))
    all_to_all = module.EPImplementationInterface()["all_to_all"]
    return [TimedTransformersLayer(all_to_all(each.module, mesh["ep"], mesh["tp"]), clock) for each in experts]


@dataclass
class TimedDispatcher:
    """Wraps a dispatcher and marks the sections "dispatch" and "combine"."""

    inner: Dispatcher
    clock: SectionClock

    @property
    def group(self) -> dist.ProcessGroup:
        """See ``Dispatcher``."""
        return self.inner.group

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
    ) -> Arrival:
        """See ``Dispatcher``."""
        with self.clock.section("dispatch"):
            return self.inner.dispatch(x, topk_idx, topk_weights, num_experts)

    def combine(self, y: torch.Tensor, arrival: Arrival) -> torch.Tensor:
        """See ``Dispatcher``."""
        with self.clock.section("combine"):
            return self.inner.combine(y, arrival)

    def synchronize(self) -> None:
        """See ``Dispatcher``."""
        self.inner.synchronize()


class TimedTransformersLayer:
    """Runs an ``EPImplementation``; what precedes its experts is "dispatch", what follows is "combine".

    Rows reach its experts by source rank, so a permutation of theirs is not in these sections.
    """

    def __init__(self, implementation: Any, clock: SectionClock) -> None:
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


class StaticDispatcher(FuscoDispatcher):
    """Dispatches into static rows.

    Attributes:
        num_rows: of the output, enough for the routing.
    """

    num_rows = 1

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
    ) -> Arrival:
        """Send tokens to their experts; rows behind the last block are uninitialised."""
        comm = self.communicator(num_experts, topk_idx.shape[1], x)
        sent = comm.dispatch(x, topk_idx, topk_weights, static=StaticRows(self.num_rows), launch=self.launch)
        return Arrival(sent.rows, sent.num_rows_per_expert, (comm, sent.handle))


class DeepEPDispatcher:
    """Moves rows with an installed DeepEP, one row for each token and rank, and permutes them on arrival."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        self.group, self._shuffle = group, BufferShuffle(group, num_experts, None)

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
    ) -> Arrival:
        """Send tokens to their experts."""
        assert num_experts % self.group.size() == 0
        rows, counts, handle = self._shuffle.dispatch(x, Routing(topk_idx, topk_weights.float()))
        return Arrival(rows, torch.tensor(counts, dtype=torch.int64, device=x.device), handle)

    def combine(self, y: torch.Tensor, arrival: Arrival) -> torch.Tensor:
        """Return the experts' results to their tokens."""
        return self._shuffle.combine(y, arrival.ticket)

    def synchronize(self) -> None:
        """Wait for the device."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()


class _ReferenceDispatcher(TorchDispatcher):
    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
    ) -> Arrival:
        return super().dispatch(x, topk_idx, topk_weights.float(), num_experts)
