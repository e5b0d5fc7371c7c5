"""Dispatch and combine within a node: the plan, rows into their slots, and their sums, over peers' memory."""
