"""``deep_ep.hybrid_ep_buffer``: HybridEP."""

from fusco.integrations.deep_ep.hybrid_ep_buffer import HybridEPBuffer
from fusco.integrations.routing_maps import indices_to_map

__all__ = ["HybridEPBuffer", "indices_to_map"]
