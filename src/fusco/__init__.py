"""Expert-parallel communication for PyTorch that lays tokens out expert-major while it moves them.

Layers, each importing only those below it::

    cli  bench              commands | benchmarks, and training that is measured
    explore                 plans, records and simulations -> a page
    integrations            the interfaces of frameworks, on the public verbs
    fsdp                    expert parallelism on FSDP2
    api                     the public verbs: validate, prepare, agree, execute
    ranks                   processes that play ranks, for benchmarks, training and tests
    offload                 copies between GPUs and host memory over several PCIe links
    cpu  cuda               the two backends; neither imports the other
    engine                  shared by both backends: the interface, byte streams, tasks
    simulate                how long a collective would take on a cluster: links, flows, systems
    planner  placement      routing -> plan, traffic -> lanes or groups | loads -> owners of experts
    rails                   several NICs of a host as one link
    schedule  control       bytes -> one-to-one stages | bootstrap, agreement and failure detection
    testbed                 hosts with rate-limited NICs in namespaces of one machine
    core                    plain values, errors, configuration

Importing ``fusco`` loads nothing but this file and the version; names load their modules when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fusco.core.version import __version__ as __version__

if TYPE_CHECKING:
    from fusco import (
        fsdp as fsdp,
        offload as offload,
        placement as placement,
        rails as rails,
        schedule as schedule,
    )
    from fusco.api.communicator import Communicator as Communicator
    from fusco.api.functional import all_to_all as all_to_all, move_experts as move_experts
    from fusco.api.handle import Dispatched as Dispatched, Handle as Handle
    from fusco.api.memory_size import memory_size_hint as memory_size_hint
    from fusco.api.move_task import MoveTask as MoveTask, Pace as Pace
    from fusco.core.config import Capacity as Capacity, Launch as Launch, Settings as Settings, StaticRows as StaticRows
    from fusco.core.errors import (
        ClosedError as ClosedError,
        CompileError as CompileError,
        ExcludedError as ExcludedError,
        FuscoError as FuscoError,
        LaunchError as LaunchError,
        MismatchError as MismatchError,
        OutputMemoryError as OutputMemoryError,
        PeerFailureError as PeerFailureError,
        RejectedInputError as RejectedInputError,
        RowOverflowError as RowOverflowError,
        SharedMemoryError as SharedMemoryError,
        ThreadError as ThreadError,
        TransportError as TransportError,
    )
    from fusco.core.groups import Groups as Groups
    from fusco.core.lanes import Lanes as Lanes, Runs as Runs
    from fusco.core.memory_size import MemorySize as MemorySize
    from fusco.core.placement import ExpertPlacement as ExpertPlacement
    from fusco.core.profile import CallCounters as CallCounters, CallProfile as CallProfile, CallTotals as CallTotals
    from fusco.core.quantization import Quantize as Quantize
    from fusco.core.routing_sizes import RoutingSizes as RoutingSizes
    from fusco.core.segments import Segments as Segments
    from fusco.core.timeline import Timeline as Timeline
    from fusco.core.topology import Topology as Topology
    from fusco.planner.balancer import BALANCERS as BALANCERS, Balancer as Balancer
    from fusco.planner.traffic import Traffic as Traffic

_MODULE_TO_NAMES = {
    "api.communicator": "Communicator",
    "api.functional": "all_to_all move_experts",
    "api.handle": "Dispatched Handle",
    "api.memory_size": "memory_size_hint",
    "api.move_task": "MoveTask Pace",
    "core.config": "Capacity Settings Launch StaticRows",
    "core.memory_size": "MemorySize",
    "core.errors": "ClosedError CompileError ExcludedError FuscoError LaunchError MismatchError OutputMemoryError "
    "PeerFailureError RejectedInputError SharedMemoryError RowOverflowError ThreadError TransportError",
    "core.groups": "Groups",
    "core.lanes": "Lanes Runs",
    "core.placement": "ExpertPlacement",
    "core.profile": "CallCounters CallProfile CallTotals",
    "core.quantization": "Quantize",
    "core.routing_sizes": "RoutingSizes",
    "core.segments": "Segments",
    "core.timeline": "Timeline",
    "core.topology": "Topology",
    "planner.balancer": "BALANCERS Balancer",
    "planner.traffic": "Traffic",
}
_NAME_TO_MODULE = {name: module for module, names in _MODULE_TO_NAMES.items() for name in names.split()}

_MODULES = (
    "fsdp",
    "offload",
    "placement",
    "rails",
    "schedule",
)  # public as modules, loaded when first used like the names above

__all__ = [*_NAME_TO_MODULE, *_MODULES, "__version__"]  # noqa: PLE0604  the keys are strings


def __getattr__(name: str) -> Any:
    if name in _MODULES or name in _NAME_TO_MODULE:
        importlib.import_module("fusco.core.requirements").check_torch()
    if name in _MODULES:
        return importlib.import_module(f"fusco.{name}")
    if name not in _NAME_TO_MODULE:
        raise AttributeError(f"module 'fusco' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fusco.{_NAME_TO_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
