"""DeepEP's module name, on fusco: found first if its parent folder leads ``PYTHONPATH``."""

import logging
import os
from typing import NoReturn

import torch

from fusco.core.version import __version__ as _version
from fusco.integrations.deep_ep.buffer import Buffer, Config
from fusco.integrations.deep_ep.events import EventHandle, EventOverlap
from fusco.integrations.deep_ep.hybrid_ep_buffer import HybridEPBuffer

__version__ = f"1.2.1+fusco.{_version}"
__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "HybridEPBuffer", "topk_idx_t"]

topk_idx_t = torch.int64

# Engines try version 2 as soon as its class exists.
_requested = os.environ.get("FUSCO_ELASTIC_BUFFER", "0")
if _requested == "1":
    from fusco.integrations.deep_ep.ep_buffer import ElasticBuffer as ElasticBuffer, EPBuffer as EPBuffer
    from fusco.integrations.deep_ep.ep_handle import EPHandle as EPHandle
    from fusco.integrations.deep_ep.expert_copies import BufferAllocator as BufferAllocator
elif _requested != "0":
    raise ValueError(f"FUSCO_ELASTIC_BUFFER must be 0 or 1, got {_requested!r}")


def __getattr__(name: str) -> NoReturn:
    if name in {"BucketBuffer", "PPBuffer", "EngramBuffer"}:
        raise AttributeError(f"fusco's deep_ep has expert parallelism only, not {name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


logging.getLogger("fusco").info("deep_ep is fusco %s, from %s", _version, __file__)
