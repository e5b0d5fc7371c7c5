"""DeepEP's module name, on fusco: found first if its parent folder leads ``PYTHONPATH``."""

import logging

import torch

import fusco
from fusco.integrations.deep_ep_buffer import Buffer, Config
from fusco.integrations.events import EventHandle, EventOverlap
from fusco.integrations.hybrid_ep import HybridEPBuffer

__version__ = f"1.2.1+fusco.{fusco.__version__}"
__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "HybridEPBuffer", "topk_idx_t"]

topk_idx_t = torch.int64

logging.getLogger("fusco").info("deep_ep is fusco %s, from %s", fusco.__version__, __file__)
