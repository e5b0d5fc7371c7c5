"""Benchmarks: verify, then measure.

``harness`` is what all share: records with their environment, rounds, times, peaks of links, worker processes.
``inputs`` are routing, prompts and matrices. Each kind has a folder or module of its own: ``shuffle``, ``alltoall``,
``schedule``, ``balancers``, ``host``, ``prefill``, ``decode``, ``rails``, ``offload``, ``train``. A rank's part
verifies every variant and times all in turn (``measure_in_turn``); all ranks' results become records (``record_of``);
``fusco.cli`` shows them.
"""
