"""``fusco bench decode``: time of a decode step of a Qwen3-MoE shape with random weights and expert parallelism.

``job`` is the configuration; ``experts`` and ``rank`` are what each rank computes; ``exchanges`` move tokens, several
ways. A step is one micro-batch or two, and is compared with a reference that computes all experts on one rank.
``records`` are the results.
"""
