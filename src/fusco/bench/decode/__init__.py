"""``fusco bench decode``: time of a decode step of a Qwen3-MoE shape with random weights and expert parallelism.

``job`` is the configuration; ``experts`` and ``model`` are what each rank computes; ``exchanges`` move tokens, several
ways; ``step`` puts them together, in one micro-batch or two; ``rank`` is the part of one rank, which compares every
step with a reference that computes all experts on one rank; ``records`` are the results.
"""
