"""Stress tests: random work compared with the specification, long runs, ranks that die, foreign clients, failing saves.

Run ``make attack`` or ``python -m attack --help``. pytest does not collect them, since they run for minutes.
"""
