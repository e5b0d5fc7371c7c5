"""Expert parallelism on FSDP2: one call distributes a model's experts and shards everything else.

``build_mesh`` arranges the ranks, ``parallelize`` distributes and shards a model, and a dispatcher moves tokens between
experts: ``FuscoDispatcher``, or ``TorchDispatcher``, the reference. ``scale_loss`` and ``clip_grad_norm_`` complete the
training loop; ``save_checkpoint``, ``load_checkpoint``, ``save_hugging_face`` and ``load_hugging_face`` write and read
weights. ``docs/fsdp.md`` has a complete loop.
"""

from fusco.core.requirements import check_fsdp

check_fsdp("fusco.fsdp", ("torch",))  # before imports that fail with an older version

from fusco.fsdp.activation_checkpointing import SHUFFLE_OPS as SHUFFLE_OPS
from fusco.fsdp.adapters import distribute_adapters as distribute_adapters
from fusco.fsdp.balanced_dispatcher import BalancedDispatcher as BalancedDispatcher
from fusco.fsdp.checkpoint import load_checkpoint as load_checkpoint, save_checkpoint as save_checkpoint
from fusco.fsdp.dispatcher import Arrival as Arrival, Dispatcher as Dispatcher
from fusco.fsdp.expert_loads import (
    LoadSummary as LoadSummary,
    expert_loads as expert_loads,
    reset_expert_loads as reset_expert_loads,
    summarize_loads as summarize_loads,
    update_expert_bias as update_expert_bias,
)
from fusco.fsdp.expert_muon import ExpertMuon as ExpertMuon
from fusco.fsdp.experts import Experts as Experts, find_experts as find_experts
from fusco.fsdp.fusco_dispatcher import FuscoDispatcher as FuscoDispatcher
from fusco.fsdp.grad_norm import (
    clip_grad_norm_ as clip_grad_norm_,
    global_sum as global_sum,
    grad_norm as grad_norm,
    scale_loss as scale_loss,
)
from fusco.fsdp.hugging_face import load_hugging_face as load_hugging_face, save_hugging_face as save_hugging_face
from fusco.fsdp.mesh import EPMesh as EPMesh, build_mesh as build_mesh
from fusco.fsdp.meta import materialize as materialize, parameters_on_meta as parameters_on_meta
from fusco.fsdp.metrics import (
    CsvWriter as CsvWriter,
    JsonLinesWriter as JsonLinesWriter,
    MetricPrinter as MetricPrinter,
    Metrics as Metrics,
    MetricWriter as MetricWriter,
    StepMetrics as StepMetrics,
    TensorBoardWriter as TensorBoardWriter,
    WandbWriter as WandbWriter,
)
from fusco.fsdp.parallelize import parallelize as parallelize
from fusco.fsdp.run_state import (
    AsyncSaver as AsyncSaver,
    HasState as HasState,
    RunState as RunState,
    latest_run as latest_run,
    load_run as load_run,
    save_run as save_run,
)
from fusco.fsdp.timed_dispatcher import TimedDispatcher as TimedDispatcher
from fusco.fsdp.torch_dispatcher import TorchDispatcher as TorchDispatcher
from fusco.fsdp.trainer_checkpoint import TrainerCheckpoint as TrainerCheckpoint
from fusco.fsdp.transformers_integration import (
    registered_as_experts_implementation as registered_as_experts_implementation,
    registered_with_transformers as registered_with_transformers,
)
from fusco.fsdp.wrapping import Sharding as Sharding
