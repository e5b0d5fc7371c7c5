"""The CUDA kernels: C++ in ``source``, compiled at run time.

``NAME`` launches the kernel of ``source/NAME.cu``: it mirrors the kernel's struct, and sets its compile-time constants
and grid, with the numbers of ``fusco.cuda.tuning``. ``compiler`` makes machine code and caches it on disk. ``library``
loads and launches kernels, ``launcher`` does so for a communicator. ``abi`` and ``comm`` have what Python and the CUDA
sources must agree on. ``fusco.cuda.context`` has the per-rank state of all launches.
"""
