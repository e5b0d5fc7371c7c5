"""How a communicator is made: its ranks meet, check what each of them wants, and connect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist

from fusco.api.collective import CheckedEngine, attempt
from fusco.api.validation import Checks, check_device
from fusco.control.bootstrap import DeviceIdentity, check_devices, introduce
from fusco.control.fingerprint import Agreement, Terms
from fusco.control.layout import ArenaLayout, Capacity
from fusco.control.store_gather import RollCall
from fusco.core.access import Access
from fusco.core.config import Settings
from fusco.core.errors import PeerFailureError, beside
from fusco.core.integers import check_integer
from fusco.core.movable import why_nothing_moves_here
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.cpu.engine import CpuEngine
from fusco.engine.base import Engine
from fusco.planner.balancer import Balancer, describe_balancer, giving_groups


@dataclass(frozen=True, kw_only=True)
class Charter:
    """What a communicator is made for, as its caller says; see ``Communicator``."""

    num_experts: int
    num_topk: int
    max_tokens_per_rank: int
    max_bytes_per_token: int
    expert_placement: Sequence[int] | None
    ranks_per_node: int | None
    balancer: Balancer
    device: str | torch.device
    settings: Settings = field(default_factory=Settings)

    def check(self, rank: int, world_size: int) -> Checks:
        """What the communicator accepts on a rank; raises as ``Communicator`` says."""
        if why_not := why_nothing_moves_here():
            raise TypeError(f"Communicator {why_not}")
        if not callable(self.balancer):
            raise TypeError(
                f"balancer must be a function of the traffic, such as fusco.BALANCERS['send-and-receive'], got "
                f"{self.balancer!r}"
            )
        capacity = Capacity(
            max_tokens_per_rank=self.max_tokens_per_rank,
            max_bytes_per_token=self.max_bytes_per_token,
            num_topk=self.num_topk,
        )
        if self.ranks_per_node is not None:
            check_integer("ranks_per_node", self.ranks_per_node, least=1)
        placement = ExpertPlacement.of(self.num_experts, self.expert_placement, world_size)
        return Checks(rank, placement, capacity, self.settings.wire_dtype, check_device(self.device))

    def terms(self, placement: ExpertPlacement, device: torch.device) -> Terms:
        """What all ranks must want alike."""
        return {
            **{name: str(value) for name, value in asdict(self.settings).items()},
            "ranks_per_node": str(self.ranks_per_node),
            "num_experts": self.num_experts,
            "num_topk": self.num_topk,
            "max_tokens_per_rank": self.max_tokens_per_rank,
            "max_bytes_per_token": self.max_bytes_per_token,
            "expert_placement": "contiguous" if self.expert_placement is None else str(placement.expert_to_rank),
            "balancer": describe_balancer(self.balancer),
            "device": device.type,
        }


def check_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or the default one for ``None``; ``TypeError`` or ``ValueError`` if there is none with this rank."""
    if not isinstance(group, (dist.ProcessGroup, type(None))):
        raise TypeError(f"this rank is not in the group, or it is none: got {group!r}")
    group = group or dist.group.WORLD
    if group is None or not dist.is_initialized():
        raise ValueError("no process group: call torch.distributed.init_process_group first, or pass a group")
    return group


def found(group: dist.ProcessGroup | None, charter: Charter) -> CheckedEngine:
    """Make a communicator's engine, together with all other ranks of the group; raises as ``Communicator`` says."""
    roll = RollCall(check_group(group), charter.settings.timeout_s)
    try:
        return _found(roll, charter)
    except Exception as error:
        with beside(error, "the other ranks could not be waited for"):
            roll.part(without=error.peers if isinstance(error, PeerFailureError) else ())
        raise


def _found(roll: RollCall, charter: Charter) -> CheckedEngine:
    def check() -> tuple[Checks, DeviceIdentity]:
        checks = charter.check(roll.rank, roll.world_size)
        return checks, DeviceIdentity.of(checks.device)

    checked, rejection = attempt(check)
    checks, device = checked or (None, DeviceIdentity.of(torch.device("cpu")))
    terms = charter.terms(checks.placement, checks.device) if checks else {}
    met = introduce(roll, Agreement("Communicator", terms, str(rejection or "")), device)
    if rejection:
        raise rejection
    assert checks is not None
    check_devices(met)
    layout = ArenaLayout(Topology.from_hosts(met.hosts, charter.ranks_per_node), checks.capacity, charter.settings)
    engine: Engine
    if checks.device.type == "cuda":
        from fusco.cuda.engine import CudaEngine  # noqa: PLC0415  needs the extra packages of fusco[cuda]

        engine = CudaEngine(roll, layout, met.hosts, met.listen_on, checks.placement, checks.device)
    else:
        engine = CpuEngine(roll, layout, met.hosts, met.listen_on)
    access = Access(f"rank {roll.rank}'s communicator #{roll.number}")
    return CheckedEngine(engine, checks, giving_groups(charter.balancer), access)
