"""``fusco bench shuffle``: dispatch and combine by fusco and by others, verified and timed."""
