"""The kernels, one noun each.

On the CPU (``copy_segments``, ``reduce_rows``, ``add_rows``) ``fusco.kernels.NAME`` takes tensors and calls
``cpu.NAME``, the loop that numba compiles. Those of CUDA are in ``cuda``, and ``fusco.engine.cuda.kernels`` launches
them. ``reference.NAME`` is the plain PyTorch twin of either.
"""
