"""``deep_ep.utils``: events."""

from fusco.integrations.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
