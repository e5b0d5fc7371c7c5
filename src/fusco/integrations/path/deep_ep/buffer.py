"""``deep_ep.buffer``: version 1."""

from fusco.integrations.deep_ep.buffer import Buffer, Config

__all__ = ["Buffer", "Config"]
