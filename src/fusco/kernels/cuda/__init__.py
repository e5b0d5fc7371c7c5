"""The CUDA kernels: C++ in ``source``, compiled at run time, and one wrapper for each.

A wrapper knows its kernel's arguments, compile-time constants and grid. ``compiler`` makes machine code and keeps it on
disk, ``library`` loads and launches, ``arguments`` mirrors the structs that kernels take.
"""
