"""Attacks on fusco: random work held against the law, long work, ranks that die or stop, strangers on its listeners.

``make attack``, or ``python -m attack --help``. Not a part of the tests that pytest finds: it goes on for minutes.
"""
