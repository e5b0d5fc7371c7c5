"""The command line. Modules import heavy things inside their commands, so that help comes at once."""
