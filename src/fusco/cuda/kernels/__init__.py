"""The CUDA kernels: C++ in ``source``, compiled at run time.

``NAME`` launches the kernel of ``source/NAME.cu``: it mirrors the struct that the kernel takes, and chooses its
compile-time constants and its grid. ``compiler`` makes machine code and keeps it on disk, ``library`` loads and
launches, ``launcher`` does so for a communicator, whose structs ``comm`` mirrors. What a communicator knows, for every
launch, is in ``fusco.cuda.context``.
"""
