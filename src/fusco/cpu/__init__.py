"""The CPU backend: shared memory within a node, gloo between nodes.

``engine`` offers the verbs. Each verb is a set of *tasks* that a single loop (``tasks``) advances in turn, so that
gathering slice i+1, sending slice i and scattering slice i-1 overlap. ``node_memory`` is what a rank sees of its node;
``channel`` carries messages; ``routing_exchange`` publishes routing; ``dispatch``, ``combine`` and ``stream`` hold
the tasks.
"""
