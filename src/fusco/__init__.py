"""fusco: expert-parallel communication that lays tokens out on the way.

Layers, each importing only those below it::

    cli  train  bench  fsdp                     commands, training that is measured, benchmarks | training on FSDP2
    collectives                                 verbs without a communicator made first
    communicator                                the public verbs
    founding  checked_engine                    how a communicator is made | what all ranks do in each verb
    checks  autograd  handle  introduction      what the verbs are made of
    engine                                      executes plans: slices, rings, overlap
    memory  kernels  transport  liveness        shared memory | copies and sums | messages | limits of waits
    planner                                     routing -> plan
    balancer  schedule                          traffic -> communication groups | bytes -> one-to-one stages
    groups  topology  placement  segments  rows  movable  settings  launch  access     plain values, made of those below
    compiled                                    functions that numba compiles
    hosts  shared_gpus  cache  sources          this machine | where compiled code is kept, under which name
    timeline  errors  integers  announcements   spans of time | what goes wrong | whole numbers | lines for a person
    requirements                                least versions

Importing ``fusco`` loads nothing but this file; names load their modules when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusco import fsdp as fsdp
    from fusco import schedule as schedule
    from fusco.balancer import BALANCERS as BALANCERS
    from fusco.balancer import Balancer as Balancer
    from fusco.balancer import Traffic as Traffic
    from fusco.collectives import all_to_all as all_to_all
    from fusco.communicator import Communicator as Communicator
    from fusco.errors import ClosedError as ClosedError
    from fusco.errors import CompileError as CompileError
    from fusco.errors import FuscoError as FuscoError
    from fusco.errors import LaunchError as LaunchError
    from fusco.errors import MismatchError as MismatchError
    from fusco.errors import OutputMemoryError as OutputMemoryError
    from fusco.errors import PeerFailureError as PeerFailureError
    from fusco.errors import RejectedInputError as RejectedInputError
    from fusco.errors import SharedMemoryError as SharedMemoryError
    from fusco.errors import SlotOverflowError as SlotOverflowError
    from fusco.errors import ThreadError as ThreadError
    from fusco.errors import TransportError as TransportError
    from fusco.groups import Groups as Groups
    from fusco.handle import Dispatched as Dispatched
    from fusco.handle import Handle as Handle
    from fusco.launch import Launch as Launch
    from fusco.launch import StaticSlots as StaticSlots
    from fusco.memory.layout import Capacity as Capacity
    from fusco.memory.layout import MemorySize as MemorySize
    from fusco.memory.size_hint import memory_size_hint as memory_size_hint
    from fusco.placement import ExpertPlacement as ExpertPlacement
    from fusco.segments import Segments as Segments
    from fusco.settings import Settings as Settings
    from fusco.topology import Topology as Topology

__version__ = "0.1.0"

_NAME_TO_MODULE = {
    "BALANCERS": "balancer",
    "Balancer": "balancer",
    "Traffic": "balancer",
    "all_to_all": "collectives",
    "Communicator": "communicator",
    "Dispatched": "handle",
    "ClosedError": "errors",
    "CompileError": "errors",
    "FuscoError": "errors",
    "LaunchError": "errors",
    "MismatchError": "errors",
    "OutputMemoryError": "errors",
    "PeerFailureError": "errors",
    "RejectedInputError": "errors",
    "SharedMemoryError": "errors",
    "SlotOverflowError": "errors",
    "ThreadError": "errors",
    "TransportError": "errors",
    "Groups": "groups",
    "Handle": "handle",
    "Launch": "launch",
    "StaticSlots": "launch",
    "Capacity": "memory.layout",
    "MemorySize": "memory.layout",
    "memory_size_hint": "memory.size_hint",
    "ExpertPlacement": "placement",
    "Segments": "segments",
    "Settings": "settings",
    "Topology": "topology",
}

_MODULES = ("fsdp", "schedule")  # public as modules, loaded when first used like the names above

__all__ = [*_NAME_TO_MODULE, *_MODULES, "__version__"]  # noqa: PLE0604  the keys are strings


def __getattr__(name: str) -> Any:
    if name in _MODULES or name in _NAME_TO_MODULE:
        importlib.import_module("fusco.requirements").check_torch()
    if name in _MODULES:
        return importlib.import_module(f"fusco.{name}")
    if name not in _NAME_TO_MODULE:
        raise AttributeError(f"module 'fusco' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fusco.{_NAME_TO_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
