"""Excludes all objects that exist from garbage collection: ranks forked afterwards collect only what they make."""

import gc

gc.collect()
gc.freeze()
