"""CPU backend: shared memory within a node, TCP between nodes.

``engine`` implements the verbs. Each verb is a set of *tasks*; a single loop (``fusco.engine.tasks``) advances them in
turn, so gathering slice i+1, sending slice i and scattering slice i-1 overlap. ``layout`` computes the offsets of a
rank's data in shared memory, ``memory`` has typed views of it. ``channel`` carries messages, ``routing_exchange``
publishes routing. ``dispatch``, ``combine`` and ``all_to_all`` contain the tasks. Small dispatches and combines send
what they have for other nodes with their records (``attachments``, ``attached_sums``).
"""
