"""Simulations that benchmarks and commands ask for: traffic by law, sweeps, published results, measured clusters."""
