"""Processes that play ranks, for benchmarks, training and tests."""
