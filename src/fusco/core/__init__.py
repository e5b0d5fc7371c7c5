"""Plain values and types that every other package uses."""
