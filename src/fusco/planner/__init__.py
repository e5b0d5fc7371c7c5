"""Pure functions from routing, expert placement and topology to a plan with two levels of descriptors.

``forwarding`` is the source's view (one copy per token and remote node), ``distribution`` the view of a rank that owns
experts (from each row of the node to all its slots), ``plan`` puts them together for one rank, ``world`` does so for
all ranks at once, and ``cost`` says what a plan will move. Source: FUSCO section 3.3.
"""
