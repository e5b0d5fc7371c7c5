"""The kernels, one noun each.

On the CPU (``copy_segments``, ``reduce_rows``, ``add_rows``) ``fusco.kernels.NAME`` takes tensors and calls
``cpu.NAME``, the loop that numba compiles. On CUDA ``cuda.NAME`` launches the kernel of ``cuda/source/NAME.cu``;
``weight_gradients`` does either. ``reference.NAME`` is the plain PyTorch twin, for all but those that only copy rows.
"""
