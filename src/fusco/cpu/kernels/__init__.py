"""CPU kernels: loops over NumPy arrays, compiled by numba at first use and cached on disk.

Each file has a wrapper that takes tensors and the compiled loop. Loops release the GIL, run on one thread, and access
only their arguments. Shape symbols are those of ``fusco.planner``.
"""
