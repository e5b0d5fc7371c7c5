"""Stress tests: random work compared with the specification, long runs, ranks that die or stop, foreign TCP clients,
hostile peers of rails, ``deep_ep`` out of step, saves that fail.

Run ``make attack`` or ``python -m attack --help``. pytest does not collect them, since they run for minutes.
"""
