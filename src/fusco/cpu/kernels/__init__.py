"""Loops over NumPy arrays, compiled by numba at first use and cached on disk.

They release the GIL, run on one thread, and touch only what their arguments name.
"""
