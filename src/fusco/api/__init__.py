"""The public verbs: validated, agreed upon by all ranks, executed by an engine."""
