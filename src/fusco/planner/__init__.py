"""Planner: pure functions from routing, expert placement and topology to a plan with two levels of descriptors.

``forwarding`` is the view of the source (one copy per token and remote node), ``distribution`` the view of a rank that
owns experts (from each row of the node to all its slots). ``dispatch_plan`` joins both for one rank, ``world`` for all
ranks at once. ``cost`` counts the bytes that a plan moves. ``balancer`` chooses the communication groups, ``internode``
and ``sending`` order the traffic between nodes. Source: FUSCO section 3.3.
"""
