"""Benchmarks of ``fusco.rails`` on a testbed; each is the analogue of a figure or table of FuseLink (OSDI 2025)."""
