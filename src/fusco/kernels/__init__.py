"""The kernels, one noun each: ``copy_segments``, ``reduce_rows``, ``add_rows``.

``fusco.kernels.NAME`` is the wrapper that dispatches on the device; ``reference.NAME`` the plain PyTorch twin of the
same signature; ``cpu.NAME`` the loop that numba compiles.
"""
