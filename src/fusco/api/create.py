"""Create a communicator: check its configuration, exchange it with all ranks, and connect."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from fusco.api.memory_size import memory_size_hint
from fusco.api.validation import Validator
from fusco.control.bootstrap import DeviceIdentity, PeerInfo, check_devices, exchange_peer_info
from fusco.control.connect import connect
from fusco.control.fingerprint import CollectiveFingerprint, Fields
from fusco.control.layout import SegmentSizes
from fusco.control.member_gather import Gather, MemberGather
from fusco.control.session import Session
from fusco.control.store_gather import StoreGather
from fusco.core.access import Access
from fusco.core.announcements import LOGGER, configure_logging
from fusco.core.config import Capacity, EngineConfig, Settings
from fusco.core.errors import FuscoError, PeerFailureError, cleanup_after, first_line
from fusco.core.integers import check_integer
from fusco.core.placement import ExpertPlacement
from fusco.core.requirements import LEAST_CAPABILITY, check_cuda_core
from fusco.core.rows import why_nothing_moves_here
from fusco.core.topology import Topology
from fusco.core.version import __version__
from fusco.cpu.engine import SPIN_S as SPIN_S_ON_CPU, CpuEngine, warm_up
from fusco.cpu.layout import CpuLayout
from fusco.engine.base import Engine
from fusco.planner.balancer import DEFAULT_BALANCERS, Balancer, checked_balancer, describe_balancer, find_balancer
from fusco.rails.rail import configured_rails, links_of_ranks

_LONGEST_TEXT = 1000
_FIRST_TOKENS = 256  # of a rank, of a communicator that grows


@dataclass(frozen=True, kw_only=True)
class CommunicatorConfig:
    """Arguments of ``Communicator``, which describes them."""

    num_experts: int
    num_topk: int
    max_tokens_per_rank: int | None  # ``None`` grows
    hidden: int | None = None
    dtype: torch.dtype = torch.bfloat16
    max_bytes_per_token: int | None = None
    expert_placement: Any = None  # as in ``ExpertPlacement.of``
    ranks_per_node: int | None = None
    balancer: Balancer | str | None = None
    device: str | torch.device = "cpu"
    settings: Settings = field(default_factory=Settings)
    room: Capacity | None = None  # what it has grown to

    def validator(self, rank: int, world_size: int) -> Validator:
        """Validate the arguments, and return what validates those of verbs; raises as ``Communicator`` does."""
        if why_not := why_nothing_moves_here():
            raise TypeError(f"Communicator {why_not}")
        if not isinstance(self.settings, Settings):
            raise TypeError(f"settings must be Settings, got {self.settings!r}")
        capacity = self.room or Capacity(
            max_tokens_per_rank=_FIRST_TOKENS if self.max_tokens_per_rank is None else self.max_tokens_per_rank,
            max_bytes_per_token=self.row_bytes(),
            num_topk=self.num_topk,
        )
        if self.ranks_per_node is not None:
            check_integer("ranks_per_node", self.ranks_per_node, least=1)
        placement = ExpertPlacement.of(self.num_experts, self.expert_placement, world_size)
        if capacity.num_topk > self.num_experts:
            raise ValueError(f"num_topk is {capacity.num_topk}, but there are {self.num_experts} experts")
        configure_logging()
        configured_rails()  # raises for interfaces that are not there
        device = check_device(self.device)
        balancer = checked_balancer(find_balancer(self.balancer or DEFAULT_BALANCERS[device.type]))
        return Validator(
            rank=rank,
            placement=replace(placement.physical),  # another object: handles know theirs
            caller_placement=placement,
            balancer=balancer,
            capacity=capacity,
            wire_dtype=self.settings.sum_dtype,
            device=device,
            widest_row=f"hidden={self.hidden} of {str(self.dtype).removeprefix('torch.')}" if self.hidden else "",
        )

    @property
    def grows(self) -> bool:
        """True if dispatches of any size find room."""
        return self.max_tokens_per_rank is None

    def with_fixed_sizes(self) -> CommunicatorConfig:
        """Return the same with the sizes that it has grown to, which are final."""
        if self.room is None:
            return replace(self, max_tokens_per_rank=_FIRST_TOKENS) if self.grows else self
        sizes = dict(vars(self.room))
        if self.hidden is not None:  # which says how many bytes
            del sizes["max_bytes_per_token"]
        return replace(self, room=None, **sizes)

    def row_bytes(self) -> int:
        """Return the bytes of a token that memory is needed for; ``ValueError`` unless one size is given."""
        if (self.hidden is None) == (self.max_bytes_per_token is None):
            given = "both" if self.hidden is not None else "neither"
            raise ValueError(
                f"give hidden (with dtype, if rows are not bfloat16) or max_bytes_per_token: got {given} "
                f"(hidden={self.hidden}, max_bytes_per_token={self.max_bytes_per_token})"
            )
        if self.max_bytes_per_token is not None:
            return self.max_bytes_per_token
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {self.dtype!r}")
        wire_dtype = self.settings.sum_dtype or self.dtype
        check_integer("hidden", self.hidden, least=1)
        return int(self.hidden or 0) * max(self.dtype.itemsize, wire_dtype.itemsize)

    def fields(self, validator: Validator) -> Fields:
        """Return the values that must be equal on all ranks."""
        placement, device = validator.caller_placement, validator.device
        assert placement is not None
        return {
            "fusco": __version__,  # others may exchange other records
            **{name: str(value) for name, value in asdict(self.settings).items()},
            "ranks_per_node": str(self.ranks_per_node),
            "num_experts": self.num_experts,
            "num_topk": validator.capacity.num_topk,
            "max_tokens_per_rank": f"{validator.capacity.max_tokens_per_rank}{' (grows)' * self.grows}",
            "max_bytes_per_token": validator.capacity.max_bytes_per_token,
            "expert_placement": "contiguous" if self.expert_placement is None else placement.digest,
            "balancer": describe_balancer(find_balancer(self.balancer or validator.balancer)),
            "device": device.type,
            "num_rails": len(configured_rails()),
        }


@dataclass(frozen=True)
class CommunicatorParts:
    """Parts of a communicator on one rank."""

    session: Session  # keeps all ranks in the same collective; its ``close`` frees all connections
    engine: Engine[Any]  # moves rows; closed before the session
    validator: Validator  # checks arguments
    config: CommunicatorConfig | None = None  # what they were made of; ``None`` if their members cannot change
    store: Store | None = None  # where other processes may ask to join
    group: weakref.ref[dist.ProcessGroup] | None = None  # weak, so that a communicator may live as long as its group


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a communicator keeps when its members change: the placement of all ranks, absent ones too, and its thread.

    ``access`` is ``None`` for a rank that joins; ``captured`` is what CUDA graphs read that go on.
    """

    placement: ExpertPlacement
    access: Access | None
    captured: Sequence[Any] = ()


def check_process_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group, for ``None`` the default one.

    Raises ``TypeError`` if this rank is not in it, ``ValueError`` if there is none.
    """
    if not isinstance(group, (dist.ProcessGroup, type(None))):
        outside = " (what new_group returns to other ranks)" if group is dist.GroupMember.NON_GROUP_MEMBER else ""
        raise TypeError(f"group must be a process group that contains this rank, got {group!r}{outside}")
    group = group or dist.group.WORLD
    if group is None or not dist.is_initialized():
        raise ValueError("no process group: call torch.distributed.init_process_group first, or pass a group")
    return group


def check_device(device: str | torch.device) -> torch.device:
    """Return the device of a communicator, with its index; ``ValueError`` if it does not exist or cannot be used."""
    try:
        wanted = torch.device(device)
    except (TypeError, RuntimeError):
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}") from None
    if wanted.type == "cpu":
        return torch.device("cpu")
    if wanted.type != "cuda":
        raise ValueError(f"device must be 'cpu' or 'cuda', got {str(device)!r}")
    if not torch.cuda.is_available():
        raise ValueError(f"device is {str(device)!r}, but this torch ({torch.__version__}) finds no CUDA device")
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    if not 0 <= index < torch.cuda.device_count():
        raise ValueError(f"device is {str(device)!r}, but there are {torch.cuda.device_count()} CUDA devices")
    check_cuda_core()
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) < LEAST_CAPABILITY:
        raise ValueError(
            f"device is {str(device)!r}, a {torch.cuda.get_device_name(index)} of compute capability {major}.{minor}; "
            f"fusco needs {'.'.join(map(str, LEAST_CAPABILITY))} (A100) or newer"
        )
    return torch.device("cuda", index)


def create(
    group: dist.ProcessGroup | None, config: CommunicatorConfig, access: Access | None = None
) -> CommunicatorParts:
    """Make a communicator's parts, together with all other ranks of the group; raises as ``Communicator`` does.

    ``access`` is that of an earlier size.
    """
    settings = config.settings if isinstance(config.settings, Settings) else Settings()  # rejected with other ranks
    store_gather = StoreGather(check_process_group(group), settings.timeout_s)
    try:
        parts = _create(store_gather, config, access=access)
        return replace(parts, group=weakref.ref(check_process_group(group)))
    except Exception as error:
        with cleanup_after(error, "the other ranks could not be waited for"):
            if isinstance(error, PeerFailureError):
                store_gather.part(without=error.peers)
            else:
                store_gather.part(reason=_failure(store_gather.rank, error))
        raise


def refuse_creation(group: dist.ProcessGroup, timeout_s: float, reason: str) -> None:
    """Take part in the creation of a communicator only to refuse it: all other ranks raise ``RejectedInputError``."""
    store_gather = StoreGather(group, timeout_s)
    refusal = CollectiveFingerprint("Communicator", rejection=reason)
    exchange_peer_info(store_gather, refusal, DeviceIdentity.of(torch.device("cpu")))
    store_gather.part()


def placement_as_text(placement: ExpertPlacement) -> dict[str, Any]:
    """Return a placement as JSON has it."""
    return asdict(placement)


def placement_of(text: Mapping[str, Any]) -> ExpertPlacement:
    """Return the placement that ``placement_as_text`` has described."""

    def rows(name: str) -> Any:
        return None if text[name] is None else tuple(map(tuple, text[name]))

    to_rank = tuple(text["expert_to_rank"])
    return ExpertPlacement(to_rank, text["world_size"], rows("physical_to_logical"), rows("shares"))


def create_next(gather: MemberGather, config: CommunicatorConfig, kept: Kept) -> CommunicatorParts:
    """Make the parts of a next generation, together with its members.

    Their placement is that of the lowest member. Raises as ``Communicator`` does, ``PeerFailureError`` also if one of
    them agrees on other members meanwhile.
    """
    gather.begin()
    try:
        # A ``place`` that a failure has interrupted may be known to some of them only.
        placements = gather.all_gather("placement", placement_as_text(kept.placement))
        return _create(gather, config, replace(kept, placement=placement_of(placements[0])))
    except PeerFailureError:
        raise
    except Exception as error:
        with cleanup_after(error, "the other ranks could not be notified"):
            gather.part(reason=_failure(gather.members[gather.rank], error))
        raise


def _create(
    store_gather: Gather, config: CommunicatorConfig, kept: Kept | None = None, access: Access | None = None
) -> CommunicatorParts:
    validator, device, rejection = None, DeviceIdentity.of(torch.device("cpu")), None
    try:
        validator = config.validator(store_gather.members[store_gather.rank], store_gather.num_ranks)
        device = DeviceIdentity.of(validator.device)
    except Exception as error:  # noqa: BLE001  raised again, once all ranks know
        validator, rejection = None, error
    fields = config.fields(validator) if validator else {}
    if kept and validator:
        validator = validator.of_members(store_gather.members, kept.placement)
        fields = {**fields, "members": str(store_gather.members), "placement": kept.placement.digest}
        fields = {name: _short(value) for name, value in fields.items()}  # a request to a status server has 64 KiB
    fingerprint = CollectiveFingerprint("Communicator", fields, first_line(rejection) if rejection else "")
    peer_info = exchange_peer_info(store_gather, fingerprint, device)
    if rejection:
        raise rejection
    assert validator is not None
    check_devices(peer_info, store_gather.members)
    topology = _topology(store_gather, peer_info, config.ranks_per_node)
    num_rails = len(configured_rails())
    rank_links = links_of_ranks(topology, peer_info.networks, num_rails) if num_rails else None
    engine_config = EngineConfig(topology, validator.capacity, config.settings, rank_links)
    access, captured = (kept.access, kept.captured) if kept else (access, ())
    parts = connect_parts(store_gather, engine_config, peer_info, validator, access, captured)
    _log_start(validator, engine_config)
    store = store_gather.groups_store if isinstance(store_gather, StoreGather) else None
    return replace(parts, config=config, store=store)


def _short(value: Any) -> Any:
    """Return a value of a fingerprint, a long text as a hash."""
    is_long = isinstance(value, str) and len(value) > _LONGEST_TEXT
    return hashlib.sha256(value.encode()).hexdigest() if is_long else value


def _topology(gather: Gather, peer_info: PeerInfo, ranks_per_node: int | None) -> Topology:
    """Return the topology of the ranks; of members it says on how many nodes of how many ranks they go on."""
    if not isinstance(gather, MemberGather):
        return Topology.from_hosts(peer_info.hosts, ranks_per_node)
    places = zip(gather.members, peer_info.hosts, strict=True)
    nodes = [(host, number // ranks_per_node if ranks_per_node else 0) for number, host in places]
    topology = Topology.of_members(gather.members, nodes)
    if topology.num_nodes > len(set(nodes)) and not gather.rank:  # once for all ranks
        LOGGER.warning(
            "nodes have different numbers of ranks now, so %d ranks go on as %d nodes of %d",
            topology.world_size,
            topology.num_nodes,
            topology.ranks_per_node,
        )
    return topology


def describe(validator: Validator, topology: Topology) -> str:
    """Return what a communicator is, in a line."""
    capacity = validator.capacity
    return (
        f"rank {validator.number} of {topology.world_size}, {validator.device}, nodes {topology.num_nodes} x "
        f"{topology.ranks_per_node}, experts {validator.num_experts}, top-{capacity.num_topk}, at most "
        f"{capacity.max_tokens_per_rank} tokens of {capacity.max_bytes_per_token} bytes"
    )


def _log_start(validator: Validator, config: EngineConfig) -> None:
    """Log what was made, once for all ranks; of other ranks at level DEBUG."""
    level = logging.DEBUG if validator.rank else logging.INFO
    if not LOGGER.isEnabledFor(level):
        return
    topology, device = config.topology, validator.device.type
    rails = ", ".join(rail.interface for rail in configured_rails())
    network = "NCCL" if device == "cuda" else f"TCP on {rails or 'the default interface'}"
    links = "shared memory" if device == "cpu" else "NVLink"
    where = links if topology.num_nodes == 1 else f"{links} and {network}"
    placement = validator.caller_placement or validator.placement
    size = memory_size_hint(topology, config.capacity, config.settings, device, placement).total_bytes / 2**30
    balancer = describe_balancer(validator.balancer)
    LOGGER.log(
        level, "communicator (%s) over %s, balancer %s, %.2f GiB", describe(validator, topology), where, balancer, size
    )


def _failure(rank: int, error: BaseException) -> str:
    return f"rank {rank} failed while it made the communicator: {type(error).__name__}: {error}"


def connect_parts(
    store_gather: Gather,
    config: EngineConfig,
    peer_info: PeerInfo,
    validator: Validator,
    access: Access | None = None,
    captured: Sequence[Any] = (),
) -> CommunicatorParts:
    """Connect to all other ranks and make the engine; after a failure everything is closed again.

    The other ranks learn at once of an error that is this rank's alone: they may be through already.
    """

    def report(kind: object, error: BaseException | None, trace: object) -> None:  # noqa: ARG001
        if error is not None and not isinstance(error, FuscoError):
            with cleanup_after(error, "the other ranks could not be notified"):
                connections.watchdog.give_up(_failure(validator.number, error))

    with ExitStack() as resources:
        engine: Engine[Any]
        if validator.device.type == "cuda":
            # Needs the extra packages of fusco[cuda].
            from fusco.cuda.engine import CudaEngine  # noqa: PLC0415
            from fusco.cuda.open_library import open_library  # noqa: PLC0415
            from fusco.cuda.tuning import SPIN_S  # noqa: PLC0415

            num_experts = validator.num_experts
            library = open_library(config, validator.placement, validator.device, num_experts)
            connections = connect(store_gather, SegmentSizes.of_control(config.topology), peer_info, SPIN_S)
            resources.callback(connections.close)
            resources.push(report)
            engine = CudaEngine(
                connections, config, validator.placement, library, num_experts=num_experts, captured=captured
            )
        else:
            sizes = CpuLayout.of(config).segment_sizes
            connections = connect(store_gather, sizes, peer_info, SPIN_S_ON_CPU, lambda: warm_up(config))
            resources.callback(connections.close)
            resources.push(report)
            engine = on_cpu = CpuEngine(connections, config)
            connections = replace(connections, mesh=on_cpu.mesh or connections.mesh)
        resources.callback(engine.close)
        access = access or Access(f"rank {validator.number}'s communicator #{store_gather.number}")
        session = Session(store_gather.rank, connections, access, on_broken=engine.abort)
        resources.pop_all()
    return CommunicatorParts(session, engine, validator)
