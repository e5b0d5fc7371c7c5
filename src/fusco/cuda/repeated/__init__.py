"""Calls that have been made before: launched again with new addresses."""
