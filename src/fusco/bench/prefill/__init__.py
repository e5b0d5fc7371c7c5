"""``fusco bench prefill``: time to the first token of a Qwen3-MoE with random weights and expert parallelism.

``job`` is the configuration, with the routing; ``model`` makes the inputs; ``variants`` move tokens, and
are compared before any is timed; ``rank`` is the part of one rank; ``records`` are the results.
"""
