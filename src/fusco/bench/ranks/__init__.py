"""Ranks for benchmarks, training and tests: processes of this machine, or those of a launched job."""
