"""Dispatch and combine between nodes: NCCL messages, and the rows and plans that they carry, in slices."""
