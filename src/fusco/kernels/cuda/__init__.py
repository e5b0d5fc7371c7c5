"""The CUDA kernels: C++ in ``source``, compiled at run time.

``compiler`` makes machine code and keeps it on disk, ``library`` loads and launches, ``arguments`` mirrors the structs
that kernels take. Compile-time constants and grids are chosen by ``fusco.engine.cuda.kernels``, which knows the
communicator.
"""
