"""What kernels announce to peers at once: for each such piece there is a word in every rank's memory."""

from __future__ import annotations

CHUNK_PAIRS = 512  # expert ids that are pushed and announced together while planning
CHUNK_ROWS = 16  # rows that are staged and announced together; any number of them begins on a multiple of 16 bytes
MAX_PARTS = 4  # warps that may share a row, if there are few rows
