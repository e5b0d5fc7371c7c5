"""The command line. Modules import heavy packages inside their commands, so that ``--help`` is fast."""
