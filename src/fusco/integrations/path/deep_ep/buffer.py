"""``deep_ep.buffer``: version 1."""

from fusco.integrations.deep_ep_buffer import Buffer, Config

__all__ = ["Buffer", "Config"]
