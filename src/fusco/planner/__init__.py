"""Planner: pure functions from routing, expert placement and topology to a plan with two levels of descriptors.

``forwarding`` is the view of the source (one copy per token and remote node), ``distribution`` the view of a rank that
owns experts (from each row of the node to all its slots); kernels compute both (on the CPU ``select_tokens`` and
``plan_pairs`` of ``fusco.cpu.kernels``). ``dispatch_plan`` joins them for one rank. ``balancer`` chooses lanes or
communication groups from ``traffic``, ``internode`` and ``sending`` order the traffic between nodes. Source: FUSCO
section 3.3.

Shape symbols, here and in ``fusco.cpu.kernels``: T tokens of a rank (``num_tokens``), K top-k (``num_topk``), H hidden,
E experts (``num_experts``), R ranks (``world_size``), N nodes (``num_nodes``), L ranks of a node (``ranks_per_node``),
M rows on a node (``num_rows``), P pairs of a rank (``num_pairs``), S slots of a rank (``num_slots``).
"""
