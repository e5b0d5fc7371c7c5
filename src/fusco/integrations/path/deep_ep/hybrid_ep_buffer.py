"""``deep_ep.hybrid_ep_buffer``: HybridEP."""

from fusco.integrations.dense_routing import indices_to_map
from fusco.integrations.hybrid_ep import HybridEPBuffer

__all__ = ["HybridEPBuffer", "indices_to_map"]
