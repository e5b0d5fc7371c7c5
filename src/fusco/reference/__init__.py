"""Plain PyTorch twins of the kernels, without their speed: of the same names, and for the CPU the same signatures.

Those of CUDA kernels that work across ranks (``plan``, ``scatter_rows``, ``combine_rows``) take what all ranks
have, and return what the kernels write.
"""
