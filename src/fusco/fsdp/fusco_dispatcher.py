"""The dispatcher that uses a fusco communicator: rows arrive expert-major, without permutation."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fusco.api.communicator import Communicator
from fusco.api.create import refuse_creation
from fusco.api.handle import Dispatched
from fusco.core.balance import Balance, BatchPlan
from fusco.core.config import FSDP_SMS, Launch, Settings, StaticRows
from fusco.core.errors import ClosedError, cleanup_after
from fusco.core.placement import ExpertPlacement
from fusco.engine.owner_choice import DeviceBatchPlan
from fusco.fsdp import ops
from fusco.fsdp.dispatcher import Arrival, BalancedArrival, ExpertCopies


@dataclass(frozen=True)
class _OpTicket:
    """The return path of a dispatch operator: the ticket of its handle, and the weights with their autograd graph."""

    tensor: torch.Tensor
    topk_weights: torch.Tensor


class FuscoDispatcher(AbstractContextManager["FuscoDispatcher"]):
    """Moves rows with a ``Communicator``, made when the first layer of its shape runs and shared by all such layers.

    Under a compiler or a dispatch mode (such as selective checkpointing), rows move by the operators
    ``torch.ops.fusco.dispatch`` and ``combine``, which these intercept; otherwise by direct calls of the communicator.
    Use it in a ``with`` block, or call ``close``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        max_tokens_per_rank: int,
        *,
        ranks_per_node: int | None = None,
        settings: Settings | None = None,
        launch: Launch | None = None,
        static: StaticRows | None = None,
    ) -> None:
        """Set the capacity and options of the communicators.

        Args:
            group: ranks among which experts are distributed: ``EPMesh.ep_group``.
            max_tokens_per_rank: the maximum number of tokens in a rank's batch: sequences times their length.
            ranks_per_node: consecutive ranks of an "ep" group that form a node; ``None`` derives it from the hosts.
            settings: of the communicators.
            launch: how dispatch and combine, forward and backward, use the device. ``None`` means
                ``Launch(num_sms=32)``, since FSDP gathers and reduces parameters on other streams at the same time:
                all kernels of NCCL and fusco that wait for peers must be resident. ``own_stream`` and ``event`` are not
                allowed.
            static: a fixed number of rows for every dispatch, so that the host waits for none: experts' results of the
                rows behind the last block are ignored. ``None`` means exactly as many as needed.
        """
        if max_tokens_per_rank < 1:
            raise ValueError(f"max_tokens_per_rank must be positive, got {max_tokens_per_rank}")
        self.launch = launch or Launch(num_sms=FSDP_SMS)
        if self.launch.own_stream or self.launch.event is not None:
            raise ValueError("a dispatcher's launch must have neither own_stream nor event: results are used at once")
        if static is not None and static.num_rows is None:
            raise ValueError(
                f"a dispatcher's static rows are blocks that follow each other, got rows_per_expert="
                f"{static.rows_per_expert}: pass StaticRows(num_rows)"
            )
        self.group, self._max_tokens_per_rank = group, max_tokens_per_rank
        self.static, self._num_ranks = static, group.size()
        self._ranks_per_node, self._settings = ranks_per_node, settings or Settings()
        self._communicators: dict[tuple[int, int, int, int], Communicator] = {}
        self._latest: Communicator | None = None  # the one that dispatched last
        self._open, self._is_closed = ExitStack(), False
        self._stream: torch.cuda.Stream | None = None  # of copies that the device has planned
        # Whether the latest of those plans had some, or the host does not know; equal on all ranks.
        self._copies_first = False
        self._key = ops.register(self)

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_experts: int,
        spare_places: int = 0,
    ) -> Arrival:
        """Send tokens to their experts; see ``Dispatcher``."""
        if ops.is_intercepted():
            num_local_experts = num_experts // self._num_ranks + spare_places
            rows, num_rows, ticket = ops.dispatch(x, topk_idx, topk_weights, num_experts, num_local_experts, self._key)
            return Arrival(rows, num_rows, _OpTicket(ticket, topk_weights))
        if x.dim() != 2 or topk_idx.dim() != 2:
            self.refuse(f"x and topk_idx need two dimensions, got {list(x.shape)} and {list(topk_idx.shape)}")
        comm = self.communicator(num_experts, topk_idx.shape[1], x, spare_places)
        sent = comm.dispatch(x, topk_idx, topk_weights, static=self.static, launch=self.launch)
        return _arrival(comm, sent)

    def dispatch_balanced(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_experts: int,
        balance: Balance,
        weights: Mapping[str, torch.Tensor],
    ) -> BalancedArrival:
        """Send tokens to experts or copies, as the device plans within a node of GPUs; see ``CopyingDispatcher``."""
        comm = self.communicator(num_experts, topk_idx.shape[1], x, balance.spare_places)
        plan: BatchPlan | DeviceBatchPlan | None
        if topk_idx.is_cuda and comm.topology.num_nodes == 1:
            plan = comm.plan_batch_on_device(topk_idx, balance)
            arrival, copies = self._dispatch_planned(comm, plan, (x, topk_idx, topk_weights, num_experts), weights)
        else:
            if ops.is_intercepted():
                plan = comm.plan_batch(topk_idx, balance)
                arrival = self.dispatch(x, topk_idx, topk_weights, num_experts, balance.spare_places)
            else:
                sent = comm.dispatch(x, topk_idx, topk_weights, balance=balance, static=self.static, launch=self.launch)
                plan, arrival = sent.batch_plan, _arrival(comm, sent)
            assert plan is not None
            copies = _copied(comm, plan, balance.spare_places, weights) if len(plan.experts) else ExpertCopies({})
        num_local = num_experts // self._num_ranks
        of_rank = plan.rows_per_expert[comm.rank * num_local : (comm.rank + 1) * num_local]
        wanted = torch.as_tensor(of_rank, device=topk_idx.device)
        return BalancedArrival(**vars(arrival), copies=copies, num_rows_wanted=wanted)

    def _dispatch_planned(
        self,
        comm: Communicator,
        plan: DeviceBatchPlan,
        sent: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int],
        weights: Mapping[str, torch.Tensor],
    ) -> tuple[Arrival, ExpertCopies]:
        """Send tokens, and copies if there may be any, on a stream of their own.

        After a batch with copies the host sends them first, before it waits in dispatch. Otherwise it knows once it has
        waited whether there are any, and they go beside the products of experts at home.
        """
        spare_places, current = plan.balance.spare_places, torch.cuda.current_stream()
        if self._stream is None:
            self._stream = torch.cuda.Stream(plan.table.device)  # type: ignore[no-untyped-call]
        num_copies = torch.empty(1, dtype=torch.int32, device="cpu", pin_memory=True)
        num_copies.copy_(plan.table[:1], non_blocking=True)

        def copied(stream: torch.cuda.Stream) -> ExpertCopies:
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                return replace(_copied(comm, plan, spare_places, weights), event=stream.record_event())

        copies = copied(self._stream) if self._copies_first else None
        arrival = self.dispatch(*sent, spare_places)
        self._copies_first = arrival.num_rows_on_host is None or bool(num_copies)
        if not self._copies_first:
            return arrival, ExpertCopies({})  # also of what was sent, so that a recomputation does the same
        return arrival, copies or copied(self._stream)

    def combine(self, y: torch.Tensor, arrival: Arrival) -> torch.Tensor:
        """Return the experts' results to their tokens; see ``Dispatcher``."""
        if isinstance(arrival.ticket, _OpTicket):
            combined: torch.Tensor = ops.combine(y, arrival.ticket.topk_weights, arrival.ticket.tensor)
        else:
            comm, handle = arrival.ticket
            combined = comm.combine(y, handle, launch=self.launch)
        return combined

    def refuse(self, reason: str) -> NoReturn:
        """Raise ``ValueError`` for the arguments of a call; all other ranks raise ``RejectedInputError`` in it.

        They do so at once in the next dispatch, of any rows, or in making the first communicator.
        """
        error = ValueError(reason)
        if self._latest:
            with self._latest.rejecting():
                raise error
        with cleanup_after(error, "the other ranks could not be notified"):
            refuse_creation(self.group, self._settings.timeout_s, reason)
        raise error

    def synchronize(self) -> None:
        """Wait until everything dispatched and combined has arrived; not a collective.

        Raises ``PeerFailureError`` if a rank failed or did not take part within ``settings.timeout_s``. On CUDA a wait
        that timed out leaves undefined data, and otherwise only the next collective raises: call this before anything
        that cannot be undone, such as a step of the optimizer.
        """
        for comm in self._communicators.values():
            comm.synchronize()

    def close(self) -> None:
        """Close all communicators; a collective. A second call does nothing."""
        self.__exit__(None, None, None)

    def __exit__(self, *error: Any) -> None:
        self._is_closed = True
        self._communicators.clear()
        self._latest = None
        self._open.__exit__(*error)

    def communicator(self, num_experts: int, num_topk: int, x: torch.Tensor, spare_places: int = 0) -> Communicator:
        """Return the communicator for rows like those of ``x`` (num_tokens, hidden); a collective when it is made.

        All ranks agree in the communicator that dispatched last to make, or to take, another one. So all of them raise
        ``MismatchError`` if one alone has rows of another size.
        """
        if self._is_closed:
            raise ClosedError("the dispatcher is closed")
        wide = torch.promote_types(x.dtype, self._settings.sum_dtype or x.dtype)  # in which sums travel
        key = (num_experts, num_topk, x.shape[1] * wide.itemsize, spare_places)
        known = self._communicators.get(key)
        if self._latest and known is not self._latest:
            sizes = ("num_experts", "num_topk", "max_bytes_per_token", *(["spare_places"] if spare_places else []))
            taking = ", ".join(f"{name}={size}" for name, size in zip(sizes, key, strict=False))
            self._latest.agree(f"Communicator({taking})")
        if known is None:
            placement = None
            if spare_places:
                placement = ExpertPlacement.contiguous(num_experts, self._num_ranks)
                placement = placement.in_places(num_experts // self._num_ranks + spare_places)
            known = Communicator(
                self.group,
                num_experts=num_experts,
                num_topk=num_topk,
                max_tokens_per_rank=self._max_tokens_per_rank,
                max_bytes_per_token=key[2],
                expert_placement=placement,
                ranks_per_node=self._ranks_per_node,
                settings=self._settings,
                device=x.device,
            )
            self._communicators[key] = self._open.enter_context(known)
        self._latest = known
        return known


def _arrival(comm: Communicator, sent: Dispatched) -> Arrival:
    return Arrival(sent.rows, sent.num_rows_per_expert, (comm, sent.handle), sent.num_rows_per_expert_on_host)


def _copied(
    comm: Communicator, plan: BatchPlan | DeviceBatchPlan, spare_places: int, weights: Mapping[str, torch.Tensor]
) -> ExpertCopies:
    return ExpertCopies(dict(zip(weights, comm.prefetch_experts([*weights.values()], plan, spare_places), strict=True)))
