"""``fusco bench prefill``: time to the first token of a Qwen3-MoE with random weights and expert parallelism.

``job`` is the configuration; ``routing`` and ``model`` make the inputs; ``variants`` move tokens, by
``dispatchers``, and ``gate`` compares them before any is timed; ``rank`` is the part of one rank; ``records`` are the
results.
"""
