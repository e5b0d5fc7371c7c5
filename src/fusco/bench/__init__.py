"""Benchmarks: traffic, specification, baseline, measurements. The library imports none of it."""
