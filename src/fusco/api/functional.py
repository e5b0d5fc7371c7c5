"""Functional collectives, as in ``torch.distributed``: the caller makes no communicator."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fusco.api.communicator import Communicator
from fusco.api.create import check_process_group
from fusco.schedule.schedule import ScheduleMode


class GroupCommunicators:
    """Communicators by process group and device, each made at its first use.

    Each has the minimum capacity, so its memory is mostly rings: ``ring_depth * ranks_per_node`` slices of shared
    memory with the default ``Settings``. It lives as long as its group and is aborted, without waiting for other ranks,
    when the group is destroyed or the process ends. Making one is a collective.
    """

    def __init__(self) -> None:
        self._by_group: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Communicator]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, group: dist.ProcessGroup | None, device: torch.device) -> Communicator:
        """Return the communicator of a group (``None``: the default one) for tensors on a device; make it if needed."""
        group = check_process_group(group)
        communicators = self._by_group.setdefault(group, {})
        if device not in communicators:
            made = communicators[device] = Communicator(
                group,
                num_experts=dist.get_world_size(group),
                num_topk=1,
                max_tokens_per_rank=1,
                max_bytes_per_token=1,
                device=device,
            )
            weakref.finalize(group, made.abort)
        return communicators[device]


# Module state: the process groups of torch, whose lifetime it follows, are global too.
_OF_GROUPS = GroupCommunicators()


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
    process group; ``None`` means the default one. The first call with a group makes a communicator for it (see
    ``GroupCommunicators``), with one node per host, and compiles the scheduler (seconds, once on each machine). Pass a
    communicator instead of a group to choose nodes or ``Settings``, or to close it.
    """
    if comm is not None and group is not None:
        raise ValueError("all_to_all takes a group or a communicator, not both")
    if comm is None:
        placed = input if output is None else output
        device = placed.device if isinstance(placed, torch.Tensor) else torch.device("cpu")
        comm = _OF_GROUPS.of(group, device)
    return comm.all_to_all(output, input, output_split_sizes, input_split_sizes, schedule=schedule)
