"""What all benchmarks share: the environment, records, times, peaks of links, processes that serve."""
