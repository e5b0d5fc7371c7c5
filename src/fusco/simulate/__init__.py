"""Simulator: how long a collective takes on a cluster, and what binds.

It is fed by the library's own planner and schedule, and moves no bytes. ``cluster`` describes ranks, links and their
constants; ``demand`` is what must move; ``systems`` turn it into flows (``flows``) over ``links``, whose rates
``maxmin`` computes. Pure: it imports planner, placement, schedule and plain values; only commands and benchmarks import
it. Every figure is a prediction.
"""
