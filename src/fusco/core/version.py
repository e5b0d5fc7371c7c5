"""Version of fusco, which the packaging reads from here."""

__version__ = "0.2.0"
