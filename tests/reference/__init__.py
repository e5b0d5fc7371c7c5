"""Plain PyTorch twins of the kernels, with the same names and, for CPU kernels, the same signatures.

Twins of CUDA kernels that work across ranks (``plan``, ``scatter_rows``, ``combine_rows``) take the data of all ranks,
and return what the kernels write.
"""
