"""The owner of each row of a dispatch, where an expert is in several places; the placement can be replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from fusco.api.collective import run_collective
from fusco.api.expert_counts import halves_of, num_packed, packed, unpacked
from fusco.api.validation import Validator
from fusco.control.fingerprint import CollectiveFingerprint, Fields
from fusco.control.layout import ControlLayout
from fusco.control.session import Session
from fusco.core.balance import Balance, BatchPlan
from fusco.core.lanes import IntArray
from fusco.core.placement import ExpertPlacement
from fusco.core.profile import Call
from fusco.core.recent import Recent
from fusco.engine.base import DispatchOutput, DispatchRequest, Engine, KnownCall, Pending, Request
from fusco.engine.owner_choice import DeviceBatchPlan, DeviceChoice, HostChoice, OwnerChoice
from fusco.placement.batch import plan_batch
from fusco.planner.owners import Int32Array, OwnerTables
from fusco.planner.routing import INDEX_DTYPES, Routing

_Result = TypeVar("_Result")


@dataclass(kw_only=True)
class PlaceRequest(Request):
    """A placement that replaces the present one, and this rank's tables of it."""

    placement: ExpertPlacement
    tables: OwnerTables

    @property
    def fields(self) -> Fields:
        """What must be equal on all ranks."""
        return {"placement": self.placement.digest}


class Owners:
    """Turns the experts that a caller names into physical experts, those that plans know.

    Attributes:
        placement: the present placement.
        placement_of_all: the same with the experts of ranks that are absent.
        are_chosen: false if there is nothing to choose by: all ids are those of physical experts.
        batch: chooses the owners of a planned batch, for the next dispatch.
        former: those of earlier members, whose tables CUDA graphs read that live.
    """

    def __init__(
        self, session: Session, engine: Engine[Any], validator: Validator, former: Sequence[Owners] = ()
    ) -> None:
        self._session, self._engine, self._validator, self.former = session, engine, validator, former
        self.placement = validator.caller_placement or validator.placement
        self.placement_of_all = validator.placement_of_all or self.placement
        self._choice: OwnerChoice | None = None
        self._on_device: DeviceChoice | None = None  # the same, if the device exchanges counts
        self.are_chosen = False
        self.batch: Callable[[torch.Tensor], torch.Tensor] | None = None  # chooses as the latest plan says
        # Graphs may be captured now and replayed after another placement.
        self._is_always_chosen = self.placement.has_places and engine.is_asynchronous
        self._max_counts = ControlLayout(engine.topology).max_counts
        self._planned_calls: Recent[tuple[KnownCall, Balance], KnownCall] = Recent(max_size=64)  # of dispatches
        self._has_copied = False  # the latest plan
        self._lost: torch.Tensor | None = None  # by expert id + 1: True for one that no rank has
        self._num_lost: torch.Tensor | int = 0
        if self.placement.has_places or self.placement.lost_experts:
            self._take(self.placement, self._tables_of(self.placement))

    @property
    def num_lost_rows(self) -> int:
        """Pairs of a token and an expert that is lost, in the dispatches of this rank; on CUDA waits for the device."""
        return int(self._num_lost)

    @property
    def are_captured(self) -> bool:
        """True while CUDA graphs live that have captured calls."""
        return self._engine.num_live_graphs() > 0

    def choose(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """Return physical experts for ids of a dispatch; a collective if they depend on the counts of all ranks.

        What is no valid ``topk_idx`` is returned as it is, for ``dispatch`` to reject.
        """
        if self.batch is None and not self._is_always_chosen and self._tables.is_identity:
            return topk_idx
        bounds: Int32Array | torch.Tensor | None = None
        planned, self.batch = self.batch, None
        if not planned and self._tables.needs_counts:
            bounds = self._divide(topk_idx)
        is_tensor = isinstance(topk_idx, torch.Tensor) and topk_idx.device == self._validator.device
        if not is_tensor or topk_idx.dtype not in INDEX_DTYPES or self._session.broken or self._choice is None:
            return topk_idx
        found = topk_idx.detach()
        if self._lost is not None and not self._validator.is_capturing:  # memory that a replay may outlive
            self._num_lost = self._num_lost + self._lost[found.clamp(-1, self.placement.num_experts) + 1].sum()
        return planned(found) if planned else self._choice.choose(found, bounds)

    def plan_batch(self, topk_idx: torch.Tensor, balance: Balance) -> BatchPlan:
        """Plan the copies of a batch, on all ranks; the next ``choose`` follows the plan."""
        refuse_capture = partial(self._validator.require_not_capturing, "plan_batch")
        if self._on_device:
            plan = self.plan_on_device(topk_idx, balance, refuse_capture).wait()
            self.batch = self.batch if len(plan.experts) else None
            return plan
        placement = self.of_members(self.placement)

        def check() -> None:
            refuse_capture()
            balance.check_placement(placement)

        known, num_experts = _plan_call(placement, balance), placement.num_experts
        return self._plan(self._exchange("plan_batch", known, topk_idx, num_experts, slice(None), check), balance)

    def plan_on_device(
        self, topk_idx: torch.Tensor, balance: Balance, check_first: Callable[[], None] = lambda: None
    ) -> DeviceBatchPlan:
        """Plan as ``plan_batch`` does, where no host waits."""
        placement, choice = self.of_members(self.placement), self._on_device

        def check() -> None:
            check_first()
            if choice is None:
                raise ValueError(
                    f"a device plans batches of a communicator on CUDA whose experts have places; this one is on "
                    f"{self._validator.device}, with {self.placement}: call plan_batch"
                )
            balance.check_placement(placement)
            if self._validator.is_capturing and not choice.has_planned(placement, balance):
                raise ValueError(
                    f"plan a batch with {balance} once before the capture: that makes tables on the device"
                )

        def prepare(request: Request, call: Call) -> Pending[DeviceBatchPlan]:  # noqa: ARG001
            assert choice is not None
            plan = choice.plan  # invalid ids are the dispatch's to report
            return Pending((), lambda _: plan(topk_idx, placement, balance))

        made = self._run("plan_batch", _plan_call(placement, balance), topk_idx, prepare, check)
        assert choice is not None
        self.batch = choice.choose_planned
        return replace(made, fetch=lambda: self._numbered(made.fetch()))

    def copy_experts(
        self, plan: DeviceBatchPlan, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], *, is_sum: bool
    ) -> None:
        """Copy experts as a plan of this communicator says, within the node; see ``DeviceChoice``."""
        assert self._on_device is not None
        self._on_device.copy_experts(plan, sources, targets, is_sum=is_sum)

    def check_plan(self, plan: DeviceBatchPlan, spare_places: int) -> None:
        """Raise ``ValueError`` unless the device can copy experts as a plan says."""
        if (num_nodes := self._engine.topology.num_nodes) > 1:
            raise ValueError(
                f"between {num_nodes} nodes the host gives NCCL the sizes of messages, so it needs the plan: pass "
                f"plan.wait()"
            )
        if plan.placement != self.of_members(self.placement):
            raise ValueError("the plan is of another placement than the communicator's present one")
        if plan.balance.spare_places != spare_places:
            raise ValueError(f"the plan has {plan.balance.spare_places} spare places, got spare_places={spare_places}")

    def _numbered(self, plan: BatchPlan) -> BatchPlan:
        """Return a plan with the ranks of the group instead of those that are left."""
        topology = self._engine.topology
        return replace(plan, ranks=np.array(topology.numbers)[plan.ranks]) if topology.members else plan

    def plans_within_dispatch(self) -> bool:
        """Return whether the next dispatch should exchange the counts for its plan itself; the same on all ranks.

        It does so if the last batch needed no copies: else it would probably be made twice.
        """
        if self._has_copied or self._engine.is_asynchronous:
            return False
        room = self._validator.capacity
        num_counts = num_packed(self.placement.num_experts) + 1 + self._engine.topology.num_nodes
        return num_counts <= self._max_counts and room.max_tokens_per_rank * room.num_topk < 1 << 16

    def planned_dispatch(
        self, topk_idx: torch.Tensor, balance: Balance, validate: Callable[[], DispatchRequest]
    ) -> tuple[BatchPlan, DispatchOutput[Any] | None]:
        """Plan a batch in the dispatch of its rows, which moves them only if no expert is to be copied."""
        choice, prepare_dispatch = self._choice, self._engine.prepare_dispatch

        def validated() -> DispatchRequest:
            request = validate()
            known = self._planned_calls.use((request.known, balance)) if request.known else None
            if known is None:
                balance.check_placement(self.of_members(self.placement))
                known = KnownCall(CollectiveFingerprint("dispatch", {**request.fields, "balance": str(balance)}))
                if request.known:
                    self._planned_calls[request.known, balance] = known
            return replace(request, known=known)

        def prepare(request: DispatchRequest, call: Call) -> Pending[tuple[BatchPlan, DispatchOutput[Any] | None]]:
            assert isinstance(choice, HostChoice)
            pending, (low, _) = prepare_dispatch(request, call), halves_of(choice.count_experts(topk_idx))
            num_counts = len(pending.counts)

            def run(counts: Sequence[tuple[int, ...]]) -> tuple[BatchPlan, DispatchOutput[Any] | None]:
                plan = self._plan(unpacked([each[num_counts:] for each in counts]), balance)
                return plan, None if self.batch else pending.run([each[:num_counts] for each in counts])

            return Pending([*pending.counts, *packed(low)], run, pending.attachment)

        return run_collective(self._session, self._engine, "dispatch", validated, prepare)

    def _plan(self, counts: IntArray, balance: Balance) -> BatchPlan:
        """Return the plan of counts (R, E) of all ranks; ``choose`` follows it next."""
        placement, topology = self.of_members(self.placement), self._engine.topology
        ranks_per_node = topology.ranks_per_node if topology.num_nodes > 1 else None
        homes, num_ranks = placement.expert_to_rank, placement.world_size
        plan = plan_batch(counts[:, : len(homes)].sum(axis=0), homes, num_ranks, balance, ranks_per_node)
        self.batch, self._has_copied = None, len(plan.experts) > 0
        if self._has_copied:
            tables = OwnerTables.of(placement, self._validator.rank, topology, (plan.experts, plan.ranks))
            bounds = tables.divide_rows(counts[:, tables.divided], _quotas(plan, tables))
            self.batch = partial(self._choose_once, tables, bounds)
        return self._numbered(plan)

    def _choose_once(self, tables: OwnerTables, bounds: Int32Array, topk_idx: torch.Tensor) -> torch.Tensor:
        """Choose by other tables than the placement's."""
        assert self._choice is not None
        self._choice.place(tables)
        try:
            return self._choice.choose(topk_idx, bounds)
        finally:
            self._choice.place(self._tables)

    def place(self, given: object) -> None:
        """Replace the placement, on all ranks."""

        def take(request: PlaceRequest) -> None:
            self._take(request.placement, request.tables)
            if self._on_device and self._captured_balances:
                self._on_device.replan(self.of_members(request.placement))
            self.placement_of_all = request.placement

        def prepare(request: PlaceRequest, call: Call) -> Pending[None]:  # noqa: ARG001
            return Pending((), lambda _: take(request))

        run_collective(self._session, self._engine, "place", partial(self._validate, given), prepare)

    def _validate(self, given: object) -> PlaceRequest:
        self._validator.require_not_capturing("place")
        physical, num_experts = self._validator.placement, self.placement.num_experts
        num_ranks = physical.world_size
        if physical.has_places or len(set(map(len, physical.rank_to_experts))) > 1 or not physical.is_contiguous:
            raise ValueError(
                f"this communicator was made with the rank of each expert, {physical.expert_to_rank}; to place experts "
                f"anew, make it with expert_placement=ExpertPlacement.replicated(...)"
            )
        if given is None:
            raise TypeError("place takes a placement, got None")
        places_per_rank = physical.num_experts // num_ranks
        may_lose = bool(self._validator.members)
        placement = ExpertPlacement.of(num_experts, given, self._validator.num_ranks, may_lose=may_lose)
        placement = placement.in_places(places_per_rank)
        for rank, experts in enumerate(placement.rank_to_experts):
            if rank not in self._validator.number_to_rank and (there := [each for each in experts if each >= 0]):
                raise ValueError(f"the placement has expert {there[0]} on rank {rank}, which is absent")
        for balance in self._captured_balances:
            try:
                balance.check_placement(self.of_members(placement))
            except ValueError as error:
                what = f"a graph has captured a plan with {balance}, whose replays follow"
                raise ValueError(f"{what}: {error}") from error
        return PlaceRequest(placement=placement, tables=self._tables_of(placement))

    @property
    def _captured_balances(self) -> Sequence[Balance]:
        return self._on_device.captured_balances if self._on_device and self.are_captured else ()

    def _tables_of(self, placement: ExpertPlacement) -> OwnerTables:
        dense = self.of_members(placement)
        return OwnerTables.of(dense, self._validator.rank, self._engine.topology)

    def of_members(self, placement: ExpertPlacement) -> ExpertPlacement:
        """Return a placement of the group's ranks as that of those that take part."""
        members = self._validator.members
        return placement.of_members(members) if members else placement

    def _take(self, placement: ExpertPlacement, tables: OwnerTables) -> None:
        if self._choice is None:
            self._choice, self.are_chosen = self._engine.owner_choice(), True
            self._on_device = self._choice if isinstance(self._choice, DeviceChoice) else None
        self._choice.place(tables)
        for each in self.former:
            each._follow(placement)  # noqa: SLF001  of this class
        self.placement, self._tables = placement, tables
        self._planned_calls.clear()
        if placement.lost_experts:
            is_lost = torch.zeros(placement.num_experts + 2, dtype=torch.bool, device="cpu")
            is_lost[torch.tensor(placement.lost_experts, dtype=torch.int64, device="cpu") + 1] = True
            self._lost = is_lost.to(self._validator.device)
        else:
            self._lost = None
        fields: Fields = {"placement": placement.digest, "divided_experts": len(tables.divided)}
        self._known = KnownCall(CollectiveFingerprint("dispatch", fields))

    def _follow(self, placement: ExpertPlacement) -> None:
        """Let replays of what was captured follow a placement of later members, where they choose owners."""
        if self._choice is not None and placement.has_places:
            self._choice.place(self._tables_of(placement))

    def _divide(self, topk_idx: torch.Tensor) -> Int32Array | torch.Tensor:
        """Exchange the counts of experts that have shares, and return this rank's bounds."""
        choice, divided = self._on_device, self._tables.divided

        def prepare(request: Request, call: Call) -> Pending[torch.Tensor]:  # noqa: ARG001
            assert choice is not None
            divide = choice.divide  # once all ranks agree, as it waits for them on the device
            return Pending((), lambda _: divide(topk_idx))

        if choice is not None:
            return self._run("dispatch", self._known, topk_idx, prepare)
        return self._tables.divide_rows(self._exchange("dispatch", self._known, topk_idx, len(divided), divided))

    def _exchange(
        self,
        name: str,
        known: KnownCall,
        topk_idx: torch.Tensor,
        num_counts: int,
        counted: IntArray | slice,
        check: Callable[[], None] = lambda: None,
    ) -> IntArray:
        """Return counts of each rank's ids of some experts, int64 (R, num_counts), in as many calls as records need.

        Records hold the low halves; the high ones follow if a rank says, behind the low ones, that some are not 0.
        """
        halves = np.zeros((0, 0), np.uint16)

        def gather(half: int) -> IntArray:
            gathered = list[IntArray]()
            for first in range(0, num_counts + 1, 4 * self._max_counts):

                def prepare(request: Request, call: Call, first: int = first) -> Pending[IntArray]:  # noqa: ARG001
                    nonlocal halves
                    if not len(halves):
                        assert isinstance(self._choice, HostChoice)
                        halves = halves_of(self._choice.count_experts(topk_idx)[counted])
                    return Pending(packed(halves[half, first : first + 4 * self._max_counts]), unpacked)

                gathered.append(self._run(name, known, topk_idx, prepare, check))
            return np.concatenate(gathered, axis=1)

        low = gather(0)
        found = low + (gather(1) << 16) if low[:, num_counts].any() else low
        return found[:, :num_counts]

    def _run(
        self,
        name: str,
        known: KnownCall,
        topk_idx: torch.Tensor,
        prepare: Callable[[Request, Call], Pending[_Result]],
        check: Callable[[], None] = lambda: None,
    ) -> _Result:
        """Return the result of a collective about ids."""
        session = self._session
        if session.has_published:  # by a call that was interrupted before it went on
            with session.access.using(name):
                session.end_interrupted()

        def validate() -> Request:
            check()
            routing = Routing(topk_idx)
            self._validator.require_routing(routing)
            if self._validator.device.type == "cpu":
                routing.check_expert_ids(self.placement.num_experts)
            return Request(known=known)

        return run_collective(session, self._engine, name, validate, prepare)


def _plan_call(placement: ExpertPlacement, balance: Balance) -> KnownCall:
    return KnownCall(CollectiveFingerprint("plan_batch", {"placement": placement.digest, "balance": str(balance)}))


def _quotas(plan: BatchPlan, tables: OwnerTables) -> IntArray:
    """Return the rows of each owner of an expert that is copied, int64 (C,); 0 for others."""
    left, num_ranks = plan.rows_per_expert.copy(), len(plan.loads)
    np.subtract.at(left, plan.experts, plan.rows)
    experts = np.repeat(np.arange(tables.num_experts), np.diff(tables.expert_to_first))  # of the owners
    quotas = np.where(tables.expert_to_divided[experts] >= 0, left[experts], 0)
    pairs = experts * num_ranks + tables.owner_to_rank  # ascending
    quotas[np.searchsorted(pairs, plan.experts * num_ranks + plan.ranks)] = plan.rows
    return quotas
