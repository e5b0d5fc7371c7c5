from fusco import fsdp as fsdp, offload as offload, placement as placement, rails as rails, schedule as schedule
from fusco.api.communicator import Communicator as Communicator
from fusco.api.functional import all_to_all as all_to_all, move_experts as move_experts
from fusco.api.handle import Dispatched as Dispatched, Handle as Handle
from fusco.api.memory_size import memory_size_hint as memory_size_hint
from fusco.api.move_task import MoveTask as MoveTask, Pace as Pace
from fusco.core.config import (
    Capacity as Capacity,
    Launch as Launch,
    RoutingSizes as RoutingSizes,
    Settings as Settings,
    StaticRows as StaticRows,
)
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
from fusco.core.lanes import Groups as Groups, Lanes as Lanes, Runs as Runs
from fusco.core.memory_size import MemorySize as MemorySize
from fusco.core.placement import ExpertPlacement as ExpertPlacement
from fusco.core.profile import CallCounters as CallCounters, CallProfile as CallProfile, CallTotals as CallTotals
from fusco.core.quantization import Quantize as Quantize
from fusco.core.segments import Segments as Segments
from fusco.core.timeline import Timeline as Timeline
from fusco.core.topology import Topology as Topology
from fusco.core.version import __version__ as __version__
from fusco.engine.owner_choice import DeviceBatchPlan as DeviceBatchPlan
from fusco.planner.balancer import BALANCERS as BALANCERS, Balancer as Balancer
from fusco.planner.traffic import Traffic as Traffic
