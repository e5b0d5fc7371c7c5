"""The CPU backend: shared memory within a node, gloo between nodes.

``engine`` offers the verbs. Each verb is a set of *tasks* that a single loop (``fusco.engine.tasks``) advances in turn,
so that gathering slice i+1, sending slice i and scattering slice i-1 overlap. ``memory`` is what a rank sees of its
node's data, ``layout`` where it is; ``channel`` carries messages; ``routing_exchange`` publishes routing; ``dispatch``,
``combine``, ``byte_streams`` and ``all_to_all`` hold the tasks.
"""
