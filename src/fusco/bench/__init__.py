"""The benchmark harness: ranks as processes, traffic, the law, the baseline. The library imports none of it."""
