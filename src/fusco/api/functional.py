"""Functional collectives, as in ``torch.distributed``: the caller makes no communicator."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fusco.api.communicator import Communicator
from fusco.api.create import check_process_group
from fusco.api.moves import Weights
from fusco.core.topology import ScheduleMode
from fusco.placement.moves import Placement

# By group and device. Module state: the process groups of torch, whose lifetime it follows, are global too.
_BY_GROUP: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Communicator]] = weakref.WeakKeyDictionary()


def all_to_all(
    output: torch.Tensor | None,
    input: torch.Tensor,  # noqa: A002  the names are those of torch.distributed.all_to_all_single
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: ScheduleMode | None = None,
    comm: Communicator | None = None,
) -> torch.Tensor:
    """Exchange rows among the ranks of a group, as ``torch.distributed.all_to_all_single``, by a schedule.

    See ``Communicator.all_to_all`` for the operation, the other arguments, the result, and errors. ``group`` is the
    process group; ``None`` means the default one. The first call with a group and a device makes a communicator, which
    is a collective, with one node per host, and compiles the scheduler (seconds, once on each machine). It has the
    minimum capacity, so its memory is mostly rings: ``ring_depth * ranks_per_node`` slices of shared memory with the
    default ``Settings``. It is aborted, without waiting for other ranks, when the group is destroyed or the process
    ends. After a failure, the next call makes another one. Pass a communicator instead of a group to choose nodes or
    ``Settings``, or to close it.
    """
    if comm is not None and group is not None:
        raise ValueError("all_to_all takes a group or a communicator, not both")
    if comm is None:
        comm = _communicator_of(check_process_group(group), _device_of(input if output is None else output))
    return comm.all_to_all(output, input, output_split_sizes, input_split_sizes, schedule=schedule)


def move_experts(
    weights: Weights | None,
    old: Placement,
    new: Placement,
    *,
    targets: Weights | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Move the weights of experts between two placements over one process group, such as from trainers to rollout.

    See ``Communicator.move_experts`` for the arguments and errors. Placements have a row for each rank of the group;
    ranks without experts in one of them have -1 there, so the owners before and after may be different ranks, with
    different numbers of places. The communicator is that of ``fusco.all_to_all`` for this group and device.
    """
    given = weights if targets is None else targets
    device = _device_of(given[0] if isinstance(given, Sequence) and given else None)
    _communicator_of(check_process_group(group), device).move_experts(weights, old, new, targets=targets)


def _device_of(tensor: object) -> torch.device:
    return tensor.device if isinstance(tensor, torch.Tensor) else torch.device("cpu")


def _communicator_of(group: dist.ProcessGroup, device: torch.device) -> Communicator:
    communicators = _BY_GROUP.setdefault(group, {})
    known = communicators.get(device)
    if known is None or known.is_broken:
        if known:
            known.abort()
        num_ranks = dist.get_world_size(group)
        made = Communicator(
            group, num_experts=num_ranks, num_topk=1, max_tokens_per_rank=1, max_bytes_per_token=1, device=device
        )
        weakref.finalize(group, made.abort)
        communicators[device] = made
    return communicators[device]
