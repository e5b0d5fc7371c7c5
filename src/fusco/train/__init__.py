"""What ``fusco train`` runs: a small Qwen3-MoE on real text, with expert parallelism on FSDP2, measured.

``job`` is what to train and how, ``text``, ``model`` and ``seeds`` what it is made of, ``rank`` the loop of one rank,
``observer`` what is measured inside a step, ``records`` what comes out, ``trace`` the routing as a file.
"""
