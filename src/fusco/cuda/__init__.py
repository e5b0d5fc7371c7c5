"""CUDA engine: direct access to peers' memory over NVLink within a node, and NCCL between nodes.

Every rank's arena is visible to all peers of its node. The device makes a plan from the routing of all ranks.
``dispatch`` pulls each row once, from any arena, into all its slots. ``combine`` pushes one partial sum for each token
and rank to the token's owner, which adds them up. Flags in the arenas signal progress to peers. Between nodes one
copy of a row goes to each node that has one of its experts, into the arena of a rank there.

``engine`` has the verbs. ``within_node`` and ``between_nodes`` implement dispatch and combine, ``byte_streams`` and
``all_to_all`` the rest, and ``repeated`` launches known calls again. All use ``context`` (arena, kernels, tables,
watchdog, timeline) and ``memory``, which peers see. ``stream_order`` keeps launches in order. ``kernels`` launches CUDA
sources. ``between_nodes.network`` aborts NCCL on timeout. ``tuning`` has every measured constant, with its source.
"""
