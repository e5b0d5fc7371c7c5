"""``fusco bench offload``: copies between GPUs and pinned host memory."""
