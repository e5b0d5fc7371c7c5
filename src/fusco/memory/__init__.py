"""Memory that the CPU backend works in: peer-visible segments, their layout, flags in them, and recycled outputs."""
