"""Engines (FUSCO's dComm) execute plans. ``base`` is the interface of every backend; the rest is shared code."""
