"""DeepEP's module name, on fusco: found first if its parent folder leads ``PYTHONPATH``."""

import logging
import os

import torch

import fusco
from fusco.integrations.deep_ep_buffer import Buffer, Config
from fusco.integrations.events import EventHandle, EventOverlap
from fusco.integrations.hybrid_ep import HybridEPBuffer

__version__ = f"1.2.1+fusco.{fusco.__version__}"
__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "HybridEPBuffer", "topk_idx_t"]

topk_idx_t = torch.int64

# Engines try version 2 as soon as its class exists.
_requested = os.environ.get("FUSCO_ELASTIC_BUFFER", "0")
if _requested == "1":
    from fusco.integrations.elastic_buffer import ElasticBuffer as ElasticBuffer
    from fusco.integrations.ep_handle import EPHandle as EPHandle
elif _requested != "0":
    raise ValueError(f"FUSCO_ELASTIC_BUFFER must be 0 or 1, got {_requested!r}")

logging.getLogger("fusco").info("deep_ep is fusco %s, from %s", fusco.__version__, __file__)
