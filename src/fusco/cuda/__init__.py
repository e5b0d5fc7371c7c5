"""The CUDA engine: over NVLink within a node, whose ranks reach each other's memory, and over NCCL between nodes.

Every rank's arena is visible to all peers of its node. A plan is made on the device from everybody's routing;
``dispatch`` pulls each row once, from wherever it is, into all its slots; ``combine`` pushes one partial sum for each
token and rank to the token's owner, which adds them up. Words in the arenas tell peers how far each one is. Between
nodes (``internode``) one copy of a row goes to each node that it concerns, into the arena of a rank there.

``engine`` has the verbs; ``intranode`` and ``internode`` dispatch and combine, ``byte_streams`` and ``all_to_all`` do
the rest. Both shuffles launch by ``context`` (arena, kernels, tables, watchdog, timeline), plan by ``planning`` and
move the rows of the node's own ranks by ``own_rows``. ``stream_order`` keeps launches in order; ``network`` sends
between nodes, and ends what does not arrive.
"""
