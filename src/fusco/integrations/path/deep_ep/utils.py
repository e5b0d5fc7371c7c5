"""``deep_ep.utils``: events."""

from fusco.integrations.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
