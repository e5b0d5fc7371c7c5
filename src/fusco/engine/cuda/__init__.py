"""The CUDA engine, for ranks of one node that reach each other's memory over NVLink.

Every rank's arena is visible to all peers. A plan is made on the device from everybody's routing; ``dispatch`` pulls
each row once, from wherever it is, into all its slots; ``combine`` pushes one partial sum for each token and rank to
the token's owner, which adds them up. Words in the arenas tell peers how far each one is.
"""
