"""Verbs about the places of experts: to replace a placement, to plan a batch, to move weights at once or in steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from fusco.api.collective import run_collective
from fusco.api.early_swaps import EarlySwaps
from fusco.api.exchanges import Exchanges
from fusco.api.move_task import MoveRequest, MoveTask, Pace, RankTransfers
from fusco.api.placement_move import ExpertMemory, PlacementMove, describe_experts, describe_places
from fusco.api.prefetch import Copies, Shapes, with_gradients
from fusco.api.uncompiled import uncompiled
from fusco.control.fingerprint import CollectiveFingerprint, Fields
from fusco.core.balance import Balance, BatchPlan
from fusco.core.lanes import IntArray
from fusco.core.placement import ExpertPlacement
from fusco.core.profile import Call
from fusco.core.rows import accumulation_dtype, require_movable_tensors, wants_grad
from fusco.engine.base import KnownCall, Pending, Request
from fusco.engine.owner_choice import DeviceBatchPlan
from fusco.placement.moves import MovePlan, MoveSteps, Placement, as_places, even_steps, fast_steps
from fusco.placement.placement import PlannedPlacement

Weights = Sequence[torch.Tensor]
Load = Callable[[int], Weights]  # of one expert


class ExpertMoves(Exchanges):
    """The verbs of a ``Communicator`` that place, plan and move experts."""

    @uncompiled
    def place(self, placement: ExpertPlacement | PlannedPlacement | Sequence[Any]) -> None:
        """Replace the placement of experts: a collective. Dispatches from the next one on follow it.

        The caller moves the weights, and has them in their new places before experts compute the rows of such a
        dispatch. Handles of earlier dispatches stay usable: their rows are where they were. On CUDA the placement
        changes in the order of the current stream, and graphs need not be captured again if the communicator was made
        with places.

        ``dispatch`` chooses an owner for each (token, k) if an expert has several, by a rule that is the same on all
        devices. Without shares it is the place on this rank; else the places on this node take turns; else all places.
        With shares each place takes its share of the expert's rows, of its own rank first, then of its node; ranks
        exchange the counts for that. A graph divides by shares if it did when it was captured.

        Args:
            placement: any form of ``expert_placement``, in at most as many places on each rank as the communicator was
                made with.

        Raises:
            ValueError: for a placement that does not fit, or if the communicator was made with the rank of each expert
                and they are not contiguous.
            MismatchError: on all ranks, if their placements differ.
        """
        self._owners.place(placement)

    @uncompiled
    def plan_batch(self, topk_idx: torch.Tensor, balance: Balance) -> BatchPlan:
        """Plan copies of this batch's busy experts into empty places; a collective, which exchanges counts of rows.

        The next ``dispatch``, of the same ids, follows the plan: each copy gets the rows that the plan gives it, of its
        own rank first, then of its node, in the block of its place. Before experts compute these rows,
        ``prefetch_experts`` copies their weights. On CUDA the device plans, and the host waits for the plan.

        Args:
            topk_idx: as for ``dispatch``.
            balance: spare places and costs, the same on all ranks. ``placement`` must have as many empty places on
                each rank, and one place of each expert.

        Returns:
            The plan, equal on all ranks.

        Raises:
            ValueError: for such a placement or invalid ids; RejectedInputError: for another rank's.
        """
        return self._owners.plan_batch(topk_idx, balance)

    @uncompiled
    def plan_batch_on_device(self, topk_idx: torch.Tensor, balance: Balance) -> DeviceBatchPlan:
        """Plan as ``plan_batch`` does, on CUDA, where no host waits; a collective, which a CUDA graph may capture.

        The next ``dispatch`` follows the plan, and ``prefetch_experts`` takes it, within a node. Plan once with
        the same ``balance`` before a capture. Replays follow ``place``, which refuses what they could not plan for.

        Args:
            topk_idx: as for ``plan_batch``.
            balance: as for ``plan_batch``.

        Returns:
            The plan in device memory, equal on all ranks; its ``wait`` returns it on the host.

        Raises:
            ValueError: as ``plan_batch``, if the communicator is on the CPU, or, in a capture, without a plan before.
            MismatchError: if ranks differ in placement or balance; PeerFailureError: if one fails.
        """
        return self._owners.plan_on_device(topk_idx, balance)

    @uncompiled
    def move_experts(
        self,
        weights: Weights | None,
        old: Placement,
        new: Placement,
        *,
        targets: Weights | None = None,
        load: Load | None = None,
    ) -> None:
        """Move the weights of experts between placements: afterwards, place p of rank r has the expert ``new[r][p]``.

        An expert crosses to a node once, however many ranks there get it; ranks of a node share its NICs, and nodes
        exchange in stages, as in ``all_to_all``. What arrives is received beside the weights: a rank needs memory for
        the experts that it receives. Nothing may use the weights during the call: on the CPU, new bytes are swapped
        with old ones that have been sent, and swapped back if a rank fails. All that is left is put into its places
        once all ranks have everything. ``new`` does not become the placement of dispatches by this.

        Args:
            weights: any number of tensors (P, ...) of any dtypes, such as FP8 values and their scales, whose rows
                ``[p]``, each contiguous, are together the expert in place p; ``None`` on a rank without experts in
                ``old`` that has ``targets``.
            old: the expert in each place of each rank, integers (R, P), -1 for none; or a placement, such as an
                ``ExpertPlacement`` or a ``fusco.placement.PlannedPlacement``. The same on all ranks.
            new: the same after the move. The number of places may differ, and ranks may have none.
            targets: tensors to move into, of the dtypes and rows of ``weights``, with the places of ``new``. ``None``
                moves in place: a place that keeps its expert is not touched. Places that are empty in ``new`` are never
                touched.
            load: for experts that no rank has in ``old``, such as those that were lost with a rank: returns the tensors
                of one expert, as ``weights`` have it in a place, from wherever it is (host memory, a checkpoint). Each
                rank calls it for its own new experts, before anything moves. Give it on all ranks or on none.

        Raises:
            TypeError, ValueError: for this rank's bad arguments; RejectedInputError: for another rank's.
            MismatchError: if ranks differ in placements, dtypes or shapes.
            PeerFailureError: if a rank fails. On every rank that raises it, all places hold their old experts. If it
                fails at the very end, other ranks may have their new ones.

        On CUDA the host waits for the device once, before the new experts are put into their places.
        """
        move, transfers, fields = self._planned_move(weights, old, new, targets, load, None)
        swaps = EarlySwaps(move, transfers)
        try:
            meanwhile = swaps.advance()
            self._run_steps("move_experts", fields, transfers, meanwhile)
            while not self._engine.is_asynchronous and next(meanwhile):  # as others are not done yet
                pass
            self._end_move(swaps.put, is_held=False)
        except BaseException:
            swaps.undo()
            raise

    @uncompiled
    def start_moving_experts(
        self,
        weights: Weights | None,
        old: Placement,
        new: Placement,
        *,
        targets: Weights | None = None,
        load: Load | None = None,
        pace: Pace | None = None,
    ) -> MoveTask:
        """Begin ``move_experts`` in steps, between which any other verb may be called; a collective.

        Call ``step`` of the task on all ranks where the network is idle, such as after a combine, until it returns
        True. Nothing moves while other verbs run, so none of them is slower.

        Args:
            weights: as in ``move_experts``. They must not change until the task is done.
            old: as in ``move_experts``.
            new: as in ``move_experts``.
            targets: as in ``move_experts``.
            load: as in ``move_experts``.
            pace: size of a step, and the share of time; ``None`` means the defaults. Steps must be of the same size on
                all ranks.
        """
        pace = pace or Pace()
        move, transfers, fields = self._planned_move(weights, old, new, targets, load, pace)
        self._agree(CollectiveFingerprint("move_experts", fields))
        end = partial(self._end_move, partial(move.put, transfers.arrived, {}))
        return MoveTask(transfers, pace, partial(self._exchange_step, "move_experts"), end)

    @uncompiled
    def prefetch_experts(
        self, weights: Weights, plan: BatchPlan | DeviceBatchPlan, spare_places: int
    ) -> tuple[torch.Tensor, ...]:
        """Copy the experts of a batch's plan from their homes to spare places; gradients return to the homes.

        Copies cross to a node once, as in ``move_experts``. The gradients of all copies of an expert travel to its home
        and are added there in ascending order of rank, in float32 (float64 for float64), so results have the same bits
        in every run; the sum is rounded once. The backward pass communicates: outputs must be part of the loss on all
        ranks or on none, with no rows if a rank has no copies.

        Args:
            weights: tensors (P, ...) of any dtypes, with this rank's experts in the order of ``placement``, without
                empty places at the end. They require gradients on all ranks or on none.
            plan: of ``fusco.placement.plan_batch``, for the experts and ranks of this communicator; the same on all
                ranks. That of ``plan_batch_on_device`` is read by the device, within a node: no host waits, and a CUDA
                graph may capture the call.
            spare_places: places for copies on each rank, the same on all ranks.

        Returns:
            For each of ``weights``, a new tensor (spare_places, ...): this rank's copies in the order of the plan, then
            zeros.

        Raises:
            TypeError, ValueError: for this rank's bad arguments; RejectedInputError: for another rank's.
            MismatchError: if ranks differ in plan, dtypes, shapes, or in requiring gradients.
            PeerFailureError: as in every collective.
        """
        if isinstance(plan, DeviceBatchPlan):
            return self._prefetch_on_device(weights, plan, spare_places)
        with self.rejecting():
            self._require_eager("prefetch_experts")
            rank, placement = self._validator.rank, self._owners.of_members(self.placement)
            copies = Copies.of(self._renumbered(plan), placement, self.topology, spare_places)
            self._require_homes(weights, placement)
        fields = _describe_copies(weights, describe_places(copies.places))
        homes = ExpertMemory(weights)
        moves = copies.moves(homes.bytes_per_expert)

        def read(i: int, begin: int, end: int) -> Iterator[torch.Tensor]:
            return homes.pieces(copies.held_place(int(moves.experts[i]), rank), begin, end)

        arrived = self._run_moves("prefetch_experts", fields, moves, read)
        spares = tuple(weight.new_zeros((spare_places, *weight.shape[1:])) for weight in weights)
        copies.put(spares, moves, arrived, rank)
        return with_gradients(weights, spares, partial(self._return_gradients, copies))

    def _prefetch_on_device(
        self, weights: Weights, plan: DeviceBatchPlan, spare_places: int
    ) -> tuple[torch.Tensor, ...]:
        """Copy experts as the device has planned."""
        with self.rejecting():
            require_movable_tensors("prefetch_experts")
            self._owners.check_plan(plan, spare_places)
            self._require_homes(weights, plan.placement)
        kinds = tuple((weight.dtype, weight.shape[1:], wants_grad(weight)) for weight in weights)
        self._agree(_device_copies_call(kinds, spare_places))
        sources = [weight.detach() for weight in weights]
        spares = tuple(weight.new_empty((spare_places, *weight.shape[1:])) for weight in sources)
        self._owners.copy_experts(plan, sources, spares, is_sum=False)

        def way_back(shapes: Shapes, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            self._agree(CollectiveFingerprint("prefetch_experts (gradients)"))
            sums = [grads[0].new_zeros(shape, dtype=accumulation_dtype(dtype)) for shape, dtype in shapes]
            self._owners.copy_experts(plan, [grad.contiguous() for grad in grads], sums, is_sum=True)
            return [total.to(dtype) for total, (_, dtype) in zip(sums, shapes, strict=True)]

        return with_gradients(weights, spares, way_back)

    def _require_homes(self, weights: Weights, placement: ExpertPlacement) -> None:
        """Raise unless weights are of this rank's experts in a placement."""
        self._validator.require_experts("weights", weights, placement.num_filled_places[self._validator.rank])

    def _planned_move(
        self,
        weights: Weights | None,
        old: Placement,
        new: Placement,
        targets: Weights | None,
        load: Load | None,
        pace: Pace | None,
    ) -> tuple[PlacementMove, RankTransfers, Fields]:
        """Return a move at a pace, or as fast as possible: its plan, what it sends, and what all ranks compare."""
        with self.rejecting():
            self._require_eager("move_experts")
            placements = self._of_members(old, "old"), self._of_members(new, "new")
            rank = self._validator.rank
            move = PlacementMove.of(placements, self.topology, rank, weights, targets, load)
            self._validator.require_experts("weights", move.sources.tensors, move.num_places(move.old))
            name = "weights" if move.is_in_place else "targets"
            self._validator.require_experts(name, move.targets.tensors, move.num_places(move.new))
            ends = even_steps(move.plan, pace.step_bytes) if pace else fast_steps(move.plan)
            steps, num_sms = MoveSteps(move.plan, ends), pace.num_sms if pace else None
            transfers = RankTransfers(steps, rank, move.read, self._engine.staging, num_sms)
        return move, transfers, {**move.fields, **({"step_bytes": pace.step_bytes} if pace else {})}

    def _of_members(self, placement: Placement, name: str) -> IntArray:
        """Return the places of the ranks that are left; ``ValueError`` if absent ones are to have experts."""
        places, members = as_places(placement, name), self._validator.members
        if not members:
            return places
        if len(places) != self._validator.num_ranks:
            raise ValueError(f"{name} has {len(places)} ranks, the group has {self._validator.num_ranks}")
        for rank in range(len(places)) if name == "new" else ():
            if rank not in members and (there := places[rank][places[rank] >= 0]).size:
                raise ValueError(f"new has expert {there[0]} on rank {rank}, which is absent")
        return places[list(members)]

    def _renumbered(self, plan: BatchPlan) -> BatchPlan:
        """Return a plan whose ranks count those that are left."""
        numbers = np.array(self.topology.numbers)
        return replace(plan, ranks=np.searchsorted(numbers, plan.ranks)) if self._validator.members else plan

    def _return_gradients(self, copies: Copies, shapes: Shapes, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients of copies to their homes; sum them there in order of rank."""
        memory = ExpertMemory([grad.contiguous() for grad in grads])
        moves = copies.moves_home(memory.bytes_per_expert)

        def read(i: int, begin: int, end: int) -> Iterator[torch.Tensor]:
            return memory.pieces(copies.place_of_copy[i], begin, end)

        arrived = self._run_moves("prefetch_experts (gradients)", {}, moves, read)
        return copies.sums(shapes, moves, arrived, grads[0])

    def _run_moves(
        self, name: str, fields: Fields, moves: MovePlan, read: Callable[[int, int, int], Iterator[torch.Tensor]]
    ) -> dict[int, list[torch.Tensor]]:
        """Run all steps of moves; return what has arrived here, by transfer."""
        steps = MoveSteps(moves, fast_steps(moves))
        transfers = RankTransfers(steps, self._validator.rank, read, self._engine.staging)
        self._run_steps(name, fields, transfers)
        return transfers.arrived

    def _run_steps(
        self, name: str, fields: Fields, transfers: RankTransfers, meanwhile: Iterator[bool] | None = None
    ) -> None:
        """Agree with all ranks once, then run all steps: each rank begins the next as soon as its own part is done."""

        def prepare(_: Request, call: Call) -> Pending[None]:
            def run(_: Sequence[tuple[int, ...]]) -> None:
                for step in range(transfers.num_steps):
                    request = transfers.request(step, meanwhile)
                    self._engine.prepare_all_to_all(request, call).run(transfers.counts(step))
                    transfers.end(step, request)

            return Pending((), run)

        request = Request(known=KnownCall(CollectiveFingerprint(name, fields)))
        run_collective(self._session, self._engine, name, lambda: request, prepare)

    def _exchange_step(self, name: str, request: MoveRequest, is_held: bool) -> bool:  # noqa: FBT001  of a ``MoveTask``
        """Exchange the bytes of a step; return False, having moved nothing, if a rank holds back."""

        def prepare(request: MoveRequest, call: Call) -> Pending[bool]:
            pending = self._engine.prepare_all_to_all(request, call)

            def run(counts: Sequence[tuple[int, ...]]) -> bool:
                if any(of_rank[0] for of_rank in counts):
                    return False
                pending.run([of_rank[1:] for of_rank in counts])
                return True

            return Pending([int(is_held), *pending.counts], run)

        return run_collective(self._session, self._engine, name, lambda: request, prepare)

    def _end_move(self, put: Callable[[], None], is_held: bool) -> bool:  # noqa: FBT001  of a ``MoveTask``
        """Put the new experts into their places once all ranks have theirs; return False if a rank holds back."""
        self._drain()  # on CUDA what a failed rank has not sent would be put into places
        if any(count for (count,) in self._agree(CollectiveFingerprint("move_experts (end)"), [int(is_held)])):
            return False
        put()
        return True

    def _require_eager(self, verb: str) -> None:
        require_movable_tensors(verb)
        self._validator.require_not_capturing(verb)


def _describe_copies(weights: Weights, copies: str) -> Fields:
    """Return what all ranks compare before copies of a batch."""
    is_needed = str(list(map(wants_grad, weights)))
    return {"copies": copies, "experts": describe_experts(weights), "requires_grad": is_needed}


@lru_cache(maxsize=64)  # the same in every batch
def _device_copies_call(
    kinds: tuple[tuple[torch.dtype, torch.Size, bool], ...], spare_places: int
) -> CollectiveFingerprint:
    weights = [torch.empty((0, *shape), dtype=dtype, device="meta", requires_grad=grad) for dtype, shape, grad in kinds]
    fields = _describe_copies(weights, f"{spare_places} places, of the device")
    return CollectiveFingerprint("prefetch_experts", fields)
