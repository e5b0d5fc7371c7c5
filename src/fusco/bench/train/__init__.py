"""Training for ``fusco train``: a small Qwen3-MoE on real text, with expert parallelism on FSDP2, measured.

``job`` is the configuration; ``text`` and ``model`` make its inputs; ``rank`` is the loop of one rank;
``records`` are the results.
"""
