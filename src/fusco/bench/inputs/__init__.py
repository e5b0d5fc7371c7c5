"""Inputs of benchmarks: routing, prompts, matrices, files of arrays."""
