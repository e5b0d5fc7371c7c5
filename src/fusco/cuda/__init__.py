"""CUDA engine: direct access to peers' memory over NVLink within a node, and NCCL between nodes.

Every rank's arena is visible to all peers of its node. The device makes a plan from the routing of all ranks.
``dispatch`` pulls each row once, from any arena, into all its slots. ``combine`` pushes one partial sum for each token
and rank to the token's owner, which adds them up. Flags in the arenas signal progress to peers. Between nodes
(``internode``) one copy of a row goes to each node that has one of its experts, into the arena of a rank there.

``engine`` has the verbs. ``intranode`` and ``internode`` implement dispatch and combine, ``byte_streams`` and
``all_to_all`` the rest. Both shuffles use ``context`` (arena, kernels, tables, watchdog, timeline), ``planning``, and
``own_rows`` for the rows of this node's ranks. ``stream_order`` keeps launches in order. ``network`` sends between
nodes and aborts NCCL on timeout. ``tuning`` has every measured constant, with its source.
"""
